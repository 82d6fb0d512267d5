"""Chooses the device if the setting is `auto`: a working GPU, else the CPU."""

from __future__ import annotations

import importlib.util
from typing import Final

import msgspec
import structlog
import torch

from runahead.runtime.wire.engine_config import (
    FP8_CAPABILITY,
    ConfigError,
    DeviceName,
    EngineConfig,
    check_config,
)

LEAST_CAPABILITY: Final = (8, 0)


def with_device(config: EngineConfig) -> EngineConfig:
    """Replace `auto` by `cpu` or `cuda`, and log it.

    Raises ConfigError if other settings can't be combined with that device.
    """
    if config.device != "auto":
        return config
    no_gpu = why_no_gpu()
    device: DeviceName = "cpu" if no_gpu else "cuda"
    why = no_gpu or torch.cuda.get_device_name(torch.cuda.current_device())
    structlog.get_logger("engine").info("device", asked="auto", device=device, why=why)
    found = msgspec.structs.replace(config, device=device)
    try:
        check_config(found, config.spelling)
    except ConfigError as error:
        raise ConfigError(f"{config.spelling('device')} auto has found {device} ({why}): {error}") from error
    return found


def check_gpu(name: str, capability: tuple[int, int], config: EngineConfig | None = None) -> None:
    """Raise ConfigError for a GPU without bfloat16 matrix units, or without FP8 conversion for an FP8 KV cache. config:
    None: without settings.
    """
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, one)) for one in (LEAST_CAPABILITY, capability))
        raise ConfigError(
            f"the kernels need a GPU of compute capability {needed} or more (A100, RTX 30 and later); "
            f"{name} has {found}; --device cpu serves without one"
        )
    if config is not None and config.kv_dtype == "fp8" and capability < FP8_CAPABILITY:
        needed, found = (".".join(map(str, one)) for one in (FP8_CAPABILITY, capability))
        raise ConfigError(
            f"{config.spelling('kv_dtype')} fp8 needs a GPU of compute capability {needed} or more (L4, RTX 40, H100 "
            f"and later); {name} has {found}: set {config.spelling('kv_dtype')} auto"
        )


def why_no_gpu() -> str:
    """Say why launches can't run on a GPU here, empty if they can. Tries one operation: a driver may list a GPU that
    has failed or is exclusively used by another process.
    """
    if not torch.backends.cuda.is_built():
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        check_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        torch.ones(1, device=device).add(1).cpu()
    except ConfigError as error:
        return str(error)
    except RuntimeError as error:
        return f"the GPU fails: {str(error).partition(chr(10))[0]}"
    return ""
