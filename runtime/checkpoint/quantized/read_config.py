"""`quantization_config` of `config.json`, and `hf_quant_config.json` of ModelOpt.

Sources: compressed-tensors (`quantization/quant_config.py`, `quantization/quant_args.py`), `FineGrainedFP8Config`,
`GPTQConfig` and `AwqConfig` of transformers, and the unified checkpoints of ModelOpt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NoReturn

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.quantized.scheme import WHOLE, Layout, Quantization, Scheme
from runahead.runtime.checkpoint.refusals import UNQUANTIZED

KEY: Final = "quantization_config"
_EVERY_LAYER: Final = ("Linear",)
_BITS: Final = (4, 8)
_COMPRESSED_TENSORS_KEYS: Final = frozenset(
    "quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio "
    "sparsity_config transform_config version run_compressed".split()
)
_LAYOUTS: Final[Mapping[str, Layout]] = {
    "float-quantized": "scaled", "int-quantized": "scaled", "naive-quantized": "scaled", "pack-quantized": "packed",
}  # fmt: skip
_MODELOPT: Final = {"FP8": (WHOLE, WHOLE), "FP8_PER_CHANNEL_PER_TOKEN": (1, WHOLE), "FP8_PB_WO": (128, 128)}


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization that `config.json` describes. raw: its content. Returns None if the checkpoint is not
    quantized.

    Raises CheckpointError naming the method or the key that is not supported.
    """
    given = raw.get(KEY)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    if not isinstance(given, dict) or not isinstance(method, str) or method not in _METHODS:
        called = method if isinstance(method, str) else given
        raise CheckpointError(f"{KEY} is {called!r}; supported are {', '.join(_METHODS)}: {UNQUANTIZED}")
    return Quantization(method, _METHODS[method](given))


def read_modelopt_file(raw: Mapping[str, Any]) -> Quantization:
    """Read the quantization of ModelOptimizer's `hf_quant_config.json`. raw: its content. Raises CheckpointError."""
    given = raw.get("quantization")
    if not isinstance(given, dict):
        raise CheckpointError(f"quantization in hf_quant_config.json is {given!r}; it must be an object")
    return Quantization("modelopt", _modelopt(given))


_Schemes = tuple[tuple[tuple[str, ...], Scheme], ...]


def _compressed_tensors(given: Mapping[str, Any]) -> _Schemes:
    if unknown := sorted(given.keys() - _COMPRESSED_TENSORS_KEYS):
        _refuse(unknown[0], given[unknown[0]], "which is not understood")
    if given.get("quantization_status") not in (None, "compressed", "frozen"):  # older tools' word for the same
        _refuse("quantization_status", given["quantization_status"], "and only 'compressed' is supported")
    if given.get("transform_config"):
        _refuse("transform_config", given["transform_config"], "which rotates activations and is not supported")
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        _refuse("sparsity_config", sparsity, "and only the format 'dense' is supported")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        _refuse("config_groups", groups, "which must be an object with a group of layers")
    return tuple(_group(name, group, given.get("format")) for name, group in groups.items())


def _group(name: str, group: Any, common_format: Any) -> tuple[tuple[str, ...], Scheme]:
    where = f"config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        _refuse(where, group, "which must be an object with weights")
    weights, targets = group["weights"], group.get("targets", list(_EVERY_LAYER))
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        _refuse(f"{where}.targets", targets, "which must list layers")
    _check_patterns(f"{where}.targets", [target for target in targets if target.startswith("re:")])
    called = group.get("format") or common_format
    layout = _LAYOUTS.get(called) if isinstance(called, str) else None
    if layout is None:
        _refuse("format", called, f"and supported are {', '.join(_LAYOUTS)}")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) not in (("float", 8), ("int", 8), ("int", 4)) or (kind, layout) == ("float", "packed"):
        _refuse(f"{where}.weights", weights, f"and {called} with {kind} of {bits} bits is not supported")
    if (bits, layout) == (4, "scaled"):
        _refuse(f"{where}.weights", weights, "and integers of 4 bits are supported in pack-quantized")
    if weights.get("dynamic") not in (None, False):
        _refuse(f"{where}.weights.dynamic", weights["dynamic"], "and only false is supported of weights")
    has_zero_points = not weights.get("symmetric", True)
    if has_zero_points and kind == "float":
        _refuse(f"{where}.weights.symmetric", weights["symmetric"], "and only true is supported of FP8")
    scheme = Scheme(layout, bits, kind == "float", _block(where, weights), has_zero_points)
    return tuple(targets), replace(scheme, is_ordered=weights.get("actorder") in (True, "group"))


def _block(where: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return (WHOLE, WHOLE)
    if strategy == "channel":
        return (1, WHOLE)
    if strategy == "group":
        return (1, _size(f"{where}.weights.group_size", size))
    if strategy != "block":
        _refuse(f"{where}.weights.strategy", strategy, "and supported are tensor, channel, group, block")
    return _pair(f"{where}.weights.block_structure", weights.get("block_structure"))


def _fp8(given: Mapping[str, Any]) -> _Schemes:
    if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        _refuse("fmt", given["fmt"], "and only 'e4m3' is supported")
    block = given.get("weight_block_size")
    found = (WHOLE, WHOLE) if block is None else _pair("weight_block_size", block)
    return ((_EVERY_LAYER, Scheme("scaled", 8, is_float=True, block=found)),)


def _modelopt(given: Mapping[str, Any]) -> _Schemes:
    algorithm = given.get("quant_algo")
    name = algorithm.upper() if isinstance(algorithm, str) else ""
    if name not in _MODELOPT:
        _refuse("quant_algo", algorithm, f"and supported are {', '.join(_MODELOPT)}")
    return ((_EVERY_LAYER, Scheme("scaled", 8, is_float=True, block=_MODELOPT[name])),)


def _gptq(given: Mapping[str, Any]) -> _Schemes:
    stored = given.get("checkpoint_format") or "gptq"
    if stored not in ("gptq", "gptq_v2") or given.get("is_marlin_format"):
        called = "marlin" if given.get("is_marlin_format") else stored
        _refuse("checkpoint_format", called, "and supported are 'gptq', 'gptq_v2'")
    if given.get("pack_dtype", "int32") != "int32":
        _refuse("pack_dtype", given["pack_dtype"], "and only 'int32' is supported")
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not rule.startswith("-:") for rule in dynamic):
        _refuse("dynamic", dynamic, "and only rules that leave layers out, '-:', are supported")
    scheme = _grouped("gptq", _bits(given), given, "group_size", zero_point_bias=1 if stored == "gptq" else 0)
    return ((_EVERY_LAYER, replace(scheme, is_ordered=bool(given.get("desc_act")))),)


def _awq(given: Mapping[str, Any]) -> _Schemes:
    if str(given.get("version", "gemm")).lower() != "gemm":
        _refuse("version", given["version"], "and only 'gemm' is supported")
    if given.get("zero_point", True) is not True:
        _refuse("zero_point", given["zero_point"], "and only true is supported")
    bits = _bits(given, "w_bit" if "w_bit" in given else "bits")
    if bits != 4:
        _refuse("bits", bits, "and only 4 is supported of AWQ")
    return ((_EVERY_LAYER, _grouped("awq", bits, given, "q_group_size" if "q_group_size" in given else "group_size")),)


def _grouped(layout: Layout, bits: int, given: Mapping[str, Any], key: str, zero_point_bias: int = 0) -> Scheme:
    size = given.get(key, 128)
    block = (1, WHOLE) if size == -1 else (1, _size(key, size))
    return Scheme(
        layout, bits, is_float=False, block=block, has_zero_points=not given.get("sym"), zero_point_bias=zero_point_bias
    )


def _bits(given: Mapping[str, Any], key: str = "bits") -> int:
    bits = given.get(key)
    if not _is_size(bits) or bits not in _BITS:
        _refuse(key, bits, "and supported are 4, 8")
    return int(bits)


def _size(key: str, size: Any) -> int:
    if not _is_size(size):
        _refuse(key, size, "which must be a positive number")
    return int(size)


def _pair(key: str, sizes: Any) -> tuple[int, int]:
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_size(size) for size in sizes):
        _refuse(key, sizes, "which must be two positive numbers: rows and columns")
    return sizes[0], sizes[1]


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _check_patterns(key: str, patterns: list[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            _refuse(key, pattern, f"which is no pattern, {error}")


def _refuse(key: str, value: Any, why: str) -> NoReturn:
    raise CheckpointError(f"{key} in {KEY} is {value!r}, {why}: {UNQUANTIZED}")


_METHODS: Final = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}
