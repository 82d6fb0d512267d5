"""Tilings that `runahead tune` found for a GPU and a model: a file in the folder of the kernel cache.

A start reads it, and its entries override the package's table. No entry may change a bit of an answer: a
product of fewer weights than one sum takes keeps the number of segments that defines it, and attention and states,
whose tilings are part of the order of their sums, have no entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import triton

from runahead.runtime.kernels.triton.gemm.tuning import (
    LEAST_COLUMNS,
    MOST_DIRECT,
    SPLIT_WORDS,
    Tiling,
    chain_of,
    segments,
    tiling_key,
    tuned,
)
from runahead.runtime.kernels.triton.gemm.warp_split_k import GRAIN, WARP_OUTPUTS
from runahead.runtime.kernels.triton.gpu.capability import current_gpu
from runahead.runtime.kernels.triton.moe.tuning import ExpertTiling

FILE: Final = "runahead-tilings.json"
_PRODUCT: Final = re.compile(r"(\d+)x(\d+) (store|add|gated|squared) (\d+) exact")
_EXPERTS: Final = re.compile(r"\d+/\d+ experts of (\d+)x(\d+) (?:gated|squared|last) (\d+)")
_WARPS: Final = (1, 2, 4, 8, 16)
_MOST_TILE: Final = 256  # of outputs, of rows of the batch
_MOST_STAGES: Final = 10
_MOST_PREFETCHED: Final = 4  # blocks, which lie in registers
_MISFIT: Final = "has sizes that do not fit the product"
AnyTiling = Tiling | ExpertTiling
_Kind = TypeVar("_Kind", Tiling, ExpertTiling)


class TunedTilingsError(OSError):
    """The file can't be used. The sentence says which entry is wrong and what to do."""


def tuned_file() -> Path:
    """Return the path of the tuned tilings, in this process's kernel cache."""
    return Path(triton.knobs.cache.dir) / FILE


def use_tuned_tilings() -> None:
    """Read the file, if there is one, for the current GPU. Before any kernel runs.

    Raises TunedTilingsError for an entry that is no tiling or that would change a bit of an answer.
    """
    tuned().clear()
    gpu, path = current_gpu(), tuned_file()
    if gpu is None or gpu.stands_for_older or not path.exists():
        return
    tuned().update(checked(_read(path).get(gpu.name, {}), str(path)))


def save_tuned_tilings(found: Mapping[str, AnyTiling]) -> Path:
    """Write what was found for the current GPU; entries of other products and GPUs stay. Returns the file.

    Raises OSError where it can't be written, or read where it is there.
    """
    gpu, path = current_gpu(), tuned_file()
    assert gpu is not None
    table = _read(path) if path.exists() else {}
    table[gpu.name] = {**table.get(gpu.name, {}), **{key: asdict(tiling) for key, tiling in found.items()}}
    written = path.with_suffix(".new")
    written.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    written.replace(path)
    return path


def checked(entries: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The entries, each a tiling with the bits of the package's. where: names the file in messages.

    Raises TunedTilingsError.
    """
    found = {}
    for key, entry in entries.items():
        if why := _why_refused(key, entry):
            raise TunedTilingsError(f"{where}: the entry {key!r} {why}; remove the file, and run `runahead tune` again")
        found[key] = dict(entry)
    return found


def neighbors(key: str, tiling: AnyTiling) -> Iterator[AnyTiling]:
    """Tilings that differ from this one in one field and have its bits. key: the product's, in the table."""
    for one in fields(tiling):
        value = getattr(tiling, one.name)
        if isinstance(value, bool):
            values: tuple[int, ...] = (not value,)
        elif one.name in ("stages", "held"):
            values = (value - 1, value + 1)
        else:
            values = (value // 2, value * 2)
        for other in values:
            changed: AnyTiling = replace(tiling, **{one.name: other})  # type: ignore[arg-type]
            if not _why_refused(key, asdict(changed)):
                yield changed


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise TunedTilingsError(
            f"{path} is not JSON: {error}; remove it, or write it anew with `runahead tune`"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(of_gpu, dict) for of_gpu in found.values()):
        raise TunedTilingsError(f"{path} has no table for each GPU; remove it, or write it anew with `runahead tune`")
    return found


def _why_refused(key: str, entry: Any) -> str:
    """The end of a sentence; empty where the entry may be used."""
    if match := _PRODUCT.fullmatch(key):
        outputs, depth, columns = int(match[1]), int(match[2]), int(match[4])
        if key != tiling_key(outputs, depth, columns, match[3]):
            return "has a name that no product has"
        return _why_no_product(entry, outputs, depth, columns, match[3])
    if match := _EXPERTS.fullmatch(key):
        if int(match[3]) < 2:
            return "is of a lone row, which has the tiling of two"
        return _why_no_experts(entry, int(match[1]))
    return "names no product whose tiling can be changed without changing a bit of an answer"


def _why_no_product(entry: Any, outputs: int, depth: int, columns: int, epilogue: str) -> str:
    tiling = _made(Tiling, entry)
    if tiling is None:
        return "is no tiling of a product"
    count = segments(outputs, depth)
    if tiling.splits != count:
        return f"cuts the product into {tiling.splits} segments, where {count} are part of the definition of its sums"
    if tiling.direct:
        return "" if _fits_directly(tiling, depth, columns, epilogue) else _MISFIT
    spread, chain = tiling.spread and tiling.splits > 1, chain_of(depth, tiling.splits)
    wide = max(columns, LEAST_COLUMNS)
    fits = (
        _is_power(tiling.rows, 8)
        and _is_power(tiling.block, 16)
        and _is_power(tiling.columns, LEAST_COLUMNS)
        and (tiling.splits == 1 or depth % (tiling.splits * tiling.block) == 0)
        and chain in (0, tiling.block)
        and not (spread and outputs * wide * tiling.splits > SPLIT_WORDS)
        and 0 <= tiling.held <= min(_MOST_PREFETCHED, depth // (tiling.splits * tiling.block))
        and 1 <= tiling.stages <= _MOST_STAGES
        and tiling.warps in _WARPS
    )
    return "" if fits else _MISFIT


def _fits_directly(tiling: Tiling, depth: int, columns: int, epilogue: str) -> bool:
    """Return whether a tiling whose weights go straight into registers fits. It has no stages."""
    segment, tiles = depth // tiling.splits, tiling.warps // tiling.splits
    chain = chain_of(depth, tiling.splits) or GRAIN
    outputs = tiling.rows * (2 if epilogue == "gated" else 1)
    return (
        columns <= MOST_DIRECT
        and tiling.warps in _WARPS
        and tiling.warps == tiles * tiling.splits
        and _is_power(tiling.rows, 8)
        and outputs % tiles == 0
        and outputs // tiles in WARP_OUTPUTS
        and _is_power(tiling.block, chain)
        and segment % tiling.block == 0
        and (tiling.stages, tiling.held, tiling.columns, tiling.spread) == (1, 0, 64, True)
    )


def _why_no_experts(entry: Any, outputs: int) -> str:
    tiling = _made(ExpertTiling, entry)
    if tiling is None:
        return "is no tiling of experts"
    fits = (
        _is_power(tiling.rows, 8)
        and tiling.rows <= max(outputs, 16)
        and _is_power(tiling.block, 16)
        and 1 <= tiling.stages <= _MOST_STAGES
        and tiling.warps in _WARPS
    )
    return "" if fits else _MISFIT


def _made(kind: type[_Kind], entry: Any) -> _Kind | None:
    """None where the entry has not exactly the fields of `kind`, each of its type."""
    types = {one.name: bool if one.type == "bool" else int for one in fields(kind)}
    if not isinstance(entry, dict) or {name: type(value) for name, value in entry.items()} != types:
        return None
    return kind(**entry)


def _is_power(number: int, least: int) -> bool:
    return least <= number <= max(_MOST_TILE, least) * 2 and number & (number - 1) == 0
