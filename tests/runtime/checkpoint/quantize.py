"""Quantizes a checkpoint in the Hugging Face layout by rounding to the nearest, in each format that is served.

    python -m tests.runtime.checkpoint.quantize FROM TO FORMAT [--group 128]

It is for tests and for figures of quality: tools that look at activations (llm-compressor, ModelOpt, GPTQModel) lose
less. Linear layers are quantized; embeddings, the head, norms, convolutions and routers keep their dtype. TO gets the
other files of FROM too. A format is one of `FORMATS`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_LINEAR: Final = re.compile(r".*\.(\w*_proj|w[123]|in_proj\w*|input_linear|output_linear)\.weight")
_STACKED: Final = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
_LARGEST: Final = 448.0  # of FP8 e4m3
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns of a word, from its lowest bits


@dataclass(frozen=True, slots=True)
class Format:
    """config: returns `quantization_config` for a group size. write: returns a layer's tensors, given its name, its
    weight, float32 [rows, columns], and the group size. takes_stacks: it takes experts that are stacked in one tensor.
    rows: the number of rows of a layer must be a multiple of this."""

    config: Callable[[int], dict[str, Any]]
    write: Callable[[str, torch.Tensor, int], Tensors]
    takes_stacks: bool = False
    rows: int = 1


def quantize(source: Path, target: Path, name: str, group: int = 128) -> None:
    """Write the checkpoint of `source` to `target` in the format `name`. group: columns that share a scale. A layer
    whose columns are no multiple of it keeps its dtype."""
    made = FORMATS[name]
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model"):
            shutil.copy(file, target / file.name)
    written: Tensors = {}
    ignored: list[str] = []
    for path in sorted(source.glob("*.safetensors")):
        for key, weight in load_file(path).items():
            if not _is_quantized(key, weight, made, group):
                written[key] = weight
                if weight.ndim == 2 and key.endswith(".weight"):
                    ignored.append(key.removesuffix(".weight"))
                continue
            written |= made.write(key.removesuffix(".weight"), weight.float(), group)
    save_file({key: tensor.contiguous() for key, tensor in written.items()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    described = made.config(group)
    if "ignore" in described:
        described["ignore"] = ignored
    if described["quant_method"] == "modelopt":
        (target / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
        described = {}
    config |= {"quantization_config": described} if described else {}
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _is_quantized(key: str, weight: torch.Tensor, made: Format, group: int) -> bool:
    if weight.ndim == 3:
        return made.takes_stacks and bool(_STACKED.fullmatch(key) or _LINEAR.fullmatch(key))
    divides = weight.ndim == 2 and not (weight.shape[0] % made.rows or weight.shape[1] % group)
    return divides and bool(_LINEAR.fullmatch(key))


# ------------------------------------------------------------ one number a byte


def _to_fp8(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in FP8 e4m3, [..., R, C], and a scale for each block of rows and columns, float32 [..., R', C']."""
    height, width = weight.shape[-2:]
    scale = torch.stack(
        [
            torch.stack([block.abs().amax((-2, -1)) for block in band.split(columns, -1)], -1)
            for band in weight.split(rows, -2)
        ],
        -2,
    )
    scale = scale.clamp(min=1e-8) / _LARGEST
    spread = scale.repeat_interleave(rows, -2)[..., :height, :].repeat_interleave(columns, -1)[..., :width]
    return (weight / spread).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale


def _fp8_tensor(key: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale = _to_fp8(weight, *weight.shape)
    made = {f"{key}.weight": codes, f"{key}.weight_scale": scale.reshape(()), f"{key}.input_scale": torch.tensor(0.25)}
    return made | ({f"{key}.k_scale": torch.tensor(1.5)} if key.endswith("k_proj") else {})


def _fp8_channel(key: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale = _to_fp8(weight, 1, weight.shape[1])
    return {f"{key}.weight": codes, f"{key}.weight_scale": scale.bfloat16()}


def _fp8_channel_flat(key: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale = _to_fp8(weight, 1, weight.shape[1])
    return {f"{key}.weight": codes, f"{key}.weight_scale": scale.reshape(-1)}


def _fp8_blocks(key: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale = _to_fp8(weight, 128, 128)
    name = key if weight.ndim == 3 and "linear" not in key else f"{key}.weight"
    return {name: codes, f"{name}_scale_inv": scale}


def _fp8_blocks_compressed(key: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale = _to_fp8(weight, 128, 128)
    return {f"{key}.weight": codes, f"{key}.weight_scale": scale.bfloat16()}


def _int8_channel(key: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale, _ = _to_integers(weight, 8, weight.shape[1], symmetric=True)
    return {f"{key}.weight": codes.to(torch.int8), f"{key}.weight_scale": scale.bfloat16()}


# ------------------------------------------------------------ integers in words of 32 bits


def _to_integers(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [rows, columns], scales [rows, groups] that float16 holds, zero points [rows, groups].

    Symmetric: integers from -2^(bits-1), zero points of 0; else from 0. order: of each column its group, where they do
    not follow each other.
    """
    rows, columns = weight.shape
    groups = torch.arange(columns) // group if order is None else order.long()
    grouped = weight[:, torch.argsort(groups, stable=True)].reshape(rows, -1, group)
    most = 2 ** (bits - 1)
    if symmetric:
        scale = grouped.abs().amax(2).clamp(min=1e-6) / (most - 0.5)
        zero, low = torch.zeros_like(scale), -most
    else:
        least, greatest = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = (greatest - least).clamp(min=1e-6) / (2 * most - 1)
        zero, low = (-least / scale).round().clamp(0, 2 * most - 1), 0
    scale = scale.half().float()
    codes = (weight / scale[:, groups] + zero[:, groups]).round().clamp(low, low + 2 * most - 1)
    return codes.int(), scale, zero.int()


def _words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """numbers: int [n, m], each of so many bits. Returns int32 [n, words], the first in the lowest bits of a word."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).reshape(len(numbers), -1, each)
    return (padded << (bits * torch.arange(each))).sum(2).int()


def _by_norm(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Of each column its group, int32, the largest columns in the first group."""
    order = torch.empty(weight.shape[1], dtype=torch.int32)
    order[torch.argsort(weight.norm(dim=0), descending=True)] = (
        torch.arange(weight.shape[1], dtype=torch.int32) // group
    )
    return order


def _packed(bits: int, *, symmetric: bool, ordered: bool = False) -> Callable[[str, torch.Tensor, int], Tensors]:
    """Of compressed-tensors: integers and zero points as they are, moved up by half of their range."""

    def write(key: str, weight: torch.Tensor, group: int) -> Tensors:
        order = _by_norm(weight, group) if ordered else None
        codes, scale, zero = _to_integers(weight, bits, group, symmetric=symmetric, order=order)
        made = {
            f"{key}.weight_packed": _words(codes + 2 ** (bits - 1) if symmetric else codes, bits),
            f"{key}.weight_scale": scale.half(),
            f"{key}.weight_shape": torch.tensor(weight.shape),
        }
        made |= {} if symmetric else {f"{key}.weight_zero_point": _words(zero.T, bits).T}
        return made | ({} if order is None else {f"{key}.weight_g_idx": order})

    return write


def _gptq(bits: int, *, symmetric: bool, stored_less_one: bool, ordered: bool = False) -> Callable[..., Tensors]:
    def write(key: str, weight: torch.Tensor, group: int) -> Tensors:
        order = _by_norm(weight, group) if ordered else torch.arange(weight.shape[1], dtype=torch.int32) // group
        codes, scale, zero = _to_integers(weight, bits, group, symmetric=symmetric, order=order)
        if symmetric:
            codes, zero = codes + 2 ** (bits - 1), zero + 2 ** (bits - 1)
        stored = (zero - 1) % 2**bits if stored_less_one else zero
        return {
            f"{key}.qweight": _words(codes, bits).T,
            f"{key}.qzeros": _words(stored.T, bits),
            f"{key}.scales": scale.T.half(),
            f"{key}.g_idx": order,
        }

    return write


def _awq(key: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale, zero = _to_integers(weight, 4, group, symmetric=False)

    def words(numbers: torch.Tensor) -> torch.Tensor:
        eights = numbers.reshape(len(numbers), -1, 8)[..., list(_AWQ_ORDER)]
        return _words(eights.reshape(numbers.shape), 4)

    return {f"{key}.qweight": words(codes.T), f"{key}.qzeros": words(zero.T), f"{key}.scales": scale.T.half()}


# ------------------------------------------------------------ configurations


def _compressed(called: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": called, "quantization_status": "compressed", "ignore": [],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "global_compression_ratio": 1.0,
    }  # fmt: skip


def _weights(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _of_groups(bits: int, *, symmetric: bool = True, actorder: str | None = None) -> Callable[[int], dict[str, Any]]:
    def config(group: int) -> dict[str, Any]:
        weights = _weights("int", bits, "group", group_size=group, actorder=actorder) | {"symmetric": symmetric}
        return _compressed("pack-quantized", weights, None)

    return config


def _of_gptq(bits: int, stored: str, *, sym: bool, desc_act: bool = False) -> Callable[[int], dict[str, Any]]:
    def config(group: int) -> dict[str, Any]:
        return {
            "quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act,
            "checkpoint_format": stored, "damp_percent": 0.01, "true_sequential": True,
        }  # fmt: skip

    return config


_DYNAMIC: Final = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_STATIC: Final = {**_DYNAMIC, "strategy": "tensor", "dynamic": False}

FORMATS: Final = {
    "fp8-per-tensor": Format(
        lambda group: _compressed("float-quantized", _weights("float", 8, "tensor"), _STATIC), _fp8_tensor
    ),
    "fp8-per-channel": Format(
        lambda group: _compressed("float-quantized", _weights("float", 8, "channel"), _DYNAMIC), _fp8_channel
    ),
    "fp8-blocks-compressed": Format(
        lambda group: _compressed(
            "float-quantized", _weights("float", 8, "block", block_structure=[128, 128]), _DYNAMIC
        ),
        _fp8_blocks_compressed,
    ),
    "fp8-blocks": Format(
        lambda group: {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
        _fp8_blocks, takes_stacks=True,
    ),
    "fp8-static": Format(
        lambda group: {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, _fp8_tensor
    ),
    "modelopt-per-tensor": Format(
        lambda group: {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, _fp8_tensor
    ),
    "modelopt-per-channel": Format(
        lambda group: {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, _fp8_channel_flat
    ),
    "int8-per-channel": Format(
        lambda group: _compressed("int-quantized", _weights("int", 8, "channel"), {**_DYNAMIC, "type": "int"}),
        _int8_channel,
    ),
    "int4-packed": Format(_of_groups(4), _packed(4, symmetric=True)),
    "int4-packed-zeros": Format(_of_groups(4, symmetric=False), _packed(4, symmetric=False)),
    "int4-packed-ordered": Format(_of_groups(4, actorder="group"), _packed(4, symmetric=True, ordered=True)),
    "int8-packed": Format(_of_groups(8), _packed(8, symmetric=True)),
    "gptq-int4": Format(_of_gptq(4, "gptq", sym=True), _gptq(4, symmetric=True, stored_less_one=True)),
    "gptq-int4-ordered": Format(
        _of_gptq(4, "gptq", sym=False, desc_act=True),
        _gptq(4, symmetric=False, stored_less_one=True, ordered=True),
    ),
    "gptq-v2-int4": Format(_of_gptq(4, "gptq_v2", sym=False), _gptq(4, symmetric=False, stored_less_one=False)),
    "gptq-int8": Format(_of_gptq(8, "gptq", sym=True), _gptq(8, symmetric=True, stored_less_one=True)),
    "awq-int4": Format(
        lambda group: {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        _awq,
        rows=8,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("target", type=Path, metavar="TO")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--group", type=int, default=128, help="columns that share a scale, of integers")
    given = parser.parse_args()
    quantize(given.source, given.target, given.format, given.group)


if __name__ == "__main__":
    main()
