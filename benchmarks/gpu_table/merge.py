"""Puts the results of all parts together: of one commit, one kind of GPU and the same versions, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.gpu_table.errors import ResultError
from benchmarks.gpu_table.results import FORMAT, Result, path_of, read

MERGED: Final = "gpu_table.json"

# What must be the same in all parts, and by which name a mixture is refused.
_SAME: Final[dict[str, Callable[[Result], object]]] = {
    "commit": lambda result: result.commit,
    "GPU": lambda result: result.machine.gpu or "none",
    "torch": lambda result: result.versions.torch,
    "triton": lambda result: result.versions.triton,
    "CUDA": lambda result: result.versions.cuda or "none",
    "Python": lambda result: result.versions.python,
    "--set": lambda result: result.settings.get("asked") or "none",
    "repeats": lambda result: result.settings.get("repeats"),
}


class Merged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every part once, in the order of their names. Each says on which machine it ran, and when."""

    format: int
    commit: str
    gpu: str
    parts: tuple[Result, ...]


def merge(results: Sequence[Result]) -> Merged:
    """Raises ResultError where there is nothing to merge, where a part comes twice, and for a mixture."""
    if not results:
        raise ResultError("there is no result to merge")
    names = [result.part for result in results]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ResultError(f"these parts come more than once: {', '.join(twice)}")
    for what, of in _SAME.items():
        found: dict[object, list[str]] = {}
        for result in results:
            found.setdefault(of(result), []).append(result.part)
        if len(found) > 1:
            mixture = "; ".join(f"{value}: {', '.join(parts)}" for value, parts in found.items())
            raise ResultError(f"the parts can't be merged, their {what} differs: {mixture}")
    ordered = tuple(sorted(results, key=lambda result: result.part))
    return Merged(format=FORMAT, commit=ordered[0].commit, gpu=ordered[0].machine.gpu, parts=ordered)


def merge_folder(folder: Path) -> Merged:
    """Merge the files of a folder's parts into one beside them. Raises ResultError."""
    paths = sorted(folder.glob("part-*.json"))
    results = [read(path) for path in paths]
    for path, result in zip(paths, results, strict=True):
        if path != path_of(result.part, folder):
            raise ResultError(f"{path} holds the part {result.part}, whose file is {path_of(result.part, folder).name}")
    merged = merge(results)
    encoded = msgspec.json.format(msgspec.json.encode(merged), indent=1)
    (folder / MERGED).write_bytes(encoded + b"\n")
    return merged
