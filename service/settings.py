"""Every setting of the service: one table, three places to set it, one frozen result.

A setting is a flag (`--run-ahead 2`), an environment variable (`RUNAHEAD_RUN_AHEAD=2`) and a key of a TOML file
(`run_ahead = 2`, the file named by `--config` or `RUNAHEAD_CONFIG`). A flag wins over the environment, the environment
over the file, the file over the default. This is the only module that reads the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

import runahead.runtime.models
from runahead.runtime.wire.engine_config import SERIAL, EngineConfig
from runahead.service.cli_parser import did_you_mean, shown

ENV_PREFIX: Final = "RUNAHEAD_"
CONFIG_VARIABLE: Final = "RUNAHEAD_CONFIG"
BUNDLED: Final = "bundled"

_ENGINE: Final = EngineConfig(model="")  # its defaults are these settings' defaults
_HIDDEN: Final = {"hidden": True}
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class SettingsError(ValueError):
    """A setting that is unknown or impossible. One sentence that names it."""


class _Offered(tuple[str, ...]):
    """Values that a shell offers for a flag. The parser lets others through: `load_settings` refuses them, and those of
    a variable or a file, with one sentence."""

    def __contains__(self, value: object) -> bool:
        return True


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The table. A field is a setting: its name, type, bounds, description and default.

    Bounds of what the engine is started with, and what can't go together, are in
    `runahead.runtime.wire.engine_config.check_config`; whether the host may be listened on is in
    `runahead.service.server.check_server_config`.
    """

    model: Annotated[str, Meta(description="checkpoint folder, or 'bundled' for the model in the package")] = BUNDLED
    served_name: Annotated[str, Meta(description="name that clients see (default: the folder's)")] = ""
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="auto: safetensors; dummy: random weights of the configured shape")
    ] = "auto"
    tokenizer: Annotated[
        Literal["auto", "none"], Meta(description="auto: the checkpoint's; none: only token ids are taken and given")
    ] = "auto"
    device: Annotated[Literal["cpu", "cuda"], Meta(description="where launches run")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="of weights and arithmetic; auto: float32 on the CPU, the checkpoint's own on CUDA"),
    ] = "auto"
    run_ahead: Annotated[
        Literal["serial", 1, 2, 3, 4], Meta(description="launches that may be queued ahead of the committed one")
    ] = 2
    run_ahead_tokens: Annotated[
        int, Meta(description="prompt tokens that a launch and the uncommitted ones it is queued behind may carry")
    ] = _ENGINE.run_ahead_tokens
    max_rows: Annotated[int, Meta(description="requests that decode together")] = _ENGINE.max_rows
    max_queue: Annotated[int, Meta(description="requests that may wait for a row")] = _ENGINE.max_queue
    context_length: Annotated[int, Meta(description="tokens a request may hold; 0: the model's own")] = 0
    block_size: Annotated[int, Meta(description="tokens a KV block holds, a power of two")] = _ENGINE.block_size
    num_blocks: Annotated[int, Meta(description="KV blocks; 0: as many as memory allows")] = _ENGINE.num_blocks
    prefill_chunk: Annotated[int, Meta(description="prompts are cut at multiples of this many tokens")] = (
        _ENGINE.prefill_chunk
    )
    max_prefill_tokens: Annotated[int, Meta(description="prompt tokens a launch may carry")] = (
        _ENGINE.max_prefill_tokens
    )
    prefix_cache: Annotated[bool, Meta(description="prompts share the KV blocks of prefixes computed before")] = (
        _ENGINE.prefix_cache
    )
    penalty_slots: Annotated[
        int, Meta(description="requests with penalties that decode together; 0: penalties are refused")
    ] = _ENGINE.penalty_slots
    log_interval: Annotated[int, Meta(description="a snapshot is logged every so many launches; 0: never")] = (
        _ENGINE.log_interval
    )
    log_mode: Annotated[
        Literal["events", "barrier"],
        Meta(description="events: from marks that have passed; barrier: the chain drains before a logged launch"),
    ] = "events"
    threads: Annotated[int, Meta(description="torch threads on the CPU; 0: one core is left to the host")] = 0
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one")] = 50051
    insecure: Annotated[bool, Meta(description="allow an address that other machines can reach")] = False
    max_streams: Annotated[int, Meta(ge=1, le=100_000, description="completions open at once; more are refused")] = 1024
    shutdown_grace_s: Annotated[
        float, Meta(ge=0, le=3600, description="seconds that a shutdown waits for open completions")
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="least severe event that is logged, by the engine too"),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"], Meta(description="auto: console on a terminal, json elsewhere")
    ] = "auto"
    launch_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=604_800,
            description="the engine stops if a launch, a request or its loop has not come further for so long",
        ),
    ] = _ENGINE.launch_timeout_s
    jitter_seed: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None,
        Meta(description="test mode of the CPU device", extra=_HIDDEN),
    ] = None
    counters_from: Annotated[int, Meta(description="test mode: where counters begin", extra=_HIDDEN)] = 0


_FIELDS: Final = {field.name: field for field in msgspec.structs.fields(Settings)}


def setting_names() -> tuple[str, ...]:
    """Names of all settings, hidden ones included, in the table's order."""
    return tuple(_FIELDS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting, and `--config`. Values stay text until `load_settings`."""
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_VARIABLE}]")
    for name in _FIELDS:
        meta = _meta(name)
        flag = "--" + name.replace("_", "-")
        if meta.extra == _HIDDEN:
            parser.add_argument(flag, help=argparse.SUPPRESS)
            continue
        help_text = f"{meta.description} [{ENV_PREFIX}{name.upper()}, default {_default(_FIELDS[name].default)}]"
        if _base_type(name) is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        else:
            offered = _Offered(map(str, _choices(name))) or None
            parser.add_argument(flag, metavar=_metavar(name), choices=offered, help=help_text)


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None, config_file: str | None = None
) -> Settings:
    """Settings from flags by name (None: not given), the environment (None: this process's) and a TOML file.

    Raises SettingsError.
    """
    environment = os.environ if environment is None else environment
    config_file = config_file or environment.get(CONFIG_VARIABLE)
    values: dict[str, Any] = {}
    for name, value in (_read_file(config_file) if config_file else {}).items():
        _require_known(name, f"key {name!r} in {config_file}", _FIELDS)
        values[name] = _convert(name, value, f"{name} in {config_file}", strict=True)
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        _require_known(variable, f"environment variable {variable}", [ENV_PREFIX + n.upper() for n in _FIELDS])
        values[name] = _convert(name, text, variable, strict=False)
    for name, given in flags.items():
        if given is not None and name in _FIELDS:
            values[name] = _convert(name, given, "--" + name.replace("_", "-"), strict=False)
    return Settings(**values)


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine is started with, its bounds unchecked. Raises SettingsError for a model that is not there."""
    folder = _model_folder(settings.model)
    return EngineConfig(
        model=str(folder),
        served_name=settings.served_name or folder.name,
        device=settings.device,
        dtype=settings.dtype,
        load_format=settings.load_format,
        run_ahead=SERIAL if settings.run_ahead == "serial" else settings.run_ahead,
        max_rows=settings.max_rows,
        max_queue=settings.max_queue,
        context_length=settings.context_length,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        prefill_chunk=settings.prefill_chunk,
        max_prefill_tokens=settings.max_prefill_tokens,
        run_ahead_tokens=settings.run_ahead_tokens,
        prefix_cache=settings.prefix_cache,
        penalty_slots=settings.penalty_slots,
        log_interval=settings.log_interval,
        log_mode=settings.log_mode,
        threads=settings.threads,
        launch_timeout_s=settings.launch_timeout_s,
        jitter_seed=settings.jitter_seed,
        counters_from=settings.counters_from,
    )


def _model_folder(model: str) -> Path:
    if model == BUNDLED:
        return Path(runahead.runtime.models.__path__[0]) / BUNDLED
    with contextlib.suppress(OSError, RuntimeError):  # too long for a path, or the home of somebody unknown
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder.resolve()
    if _HUB_ID.fullmatch(model):
        name = model.split("/")[1]
        raise SettingsError(
            f"model {model!r} is no folder here and looks like a hub id; nothing is downloaded while serving, so fetch "
            f"it first with `hf download {model} --local-dir {name}` and then give `--model {name}`"
        )
    raise SettingsError(f"model {shown(model)} is no folder; give one with config.json, safetensors and tokenizer.json")


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"config file {path} can't be read: {error}") from error


def _require_known(name: str, what: str, known: Iterable[str]) -> None:
    if name in known:
        return
    raise SettingsError(f"{what} is no setting" + did_you_mean(name, known))


def _convert(name: str, value: object, source: str, *, strict: bool) -> object:
    try:
        if isinstance(value, str):
            value.encode("utf-8")  # bytes of a flag or a variable that are no text
        return msgspec.convert(value, _FIELDS[name].type, strict=strict)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise SettingsError(f"{source} must be {_expected(name)}, and is {shown(value)}") from error


def _meta(name: str) -> Meta:
    meta: Meta = _FIELDS[name].type.__metadata__[0]
    return meta


def _base_type(name: str) -> object:
    return _FIELDS[name].type.__origin__


def _choices(name: str) -> tuple[object, ...]:
    base = _base_type(name)
    return get_args(base) if get_origin(base) is Literal else ()


def _metavar(name: str) -> str:
    if choices := _choices(name):
        return "|".join(map(str, choices))
    return "TEXT" if _base_type(name) is str else "N"


def _expected(name: str) -> str:
    """What a value of this setting looks like, to end a sentence with."""
    if choices := [str(choice) for choice in _choices(name)]:
        return ", ".join(choices[:-1]) + " or " + choices[-1]
    if _base_type(name) is str:
        return "text in UTF-8"
    if _base_type(name) is bool:
        return "true or false"
    meta = _meta(name)
    kind = "a number" if _base_type(name) is float else "a whole number"
    if meta.gt is not None:
        return f"{kind} above {meta.gt}, at most {meta.le}"
    return kind + (f" from {meta.ge} to {meta.le}" if meta.ge is not None else "")


def _default(default: object) -> str:
    if default == "":
        return "unset"
    return str(default).lower() if isinstance(default, bool) else str(default)
