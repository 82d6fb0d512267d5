"""How attention of prompt chunks is cut where that was measured on this GPU.

`measured_chunk_attention.json` was measured on an H200. A plan says in which order keys are folded, so `runahead tune`
changes none. A shape that the table lacks has no plan, and a GPU has none unless one of its kind is there
(`Gpu.measured_as`): then attention of chunks is `chunk_attention`'s own, with tiles of 32 query tokens of one head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.gpu.capability import current_gpu

TABLE: Final = Path(__file__).with_name("measured_chunk_attention.json")
_HALVES: Final = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """lines: of a program's tile: pairs of a query token and one of the query heads that read the same KV head. keys:
    tokens that it looks at together. programs: that take one item after the other. stages: tiles of keys and values on
    their way at a time. parts: into how many parts what a tile sees may be cut; 1: no tile is, so that a query token's
    bits do not hang on how many others its row has. part_keys: tokens of a part, at least. copiers: warps of a program
    that do nothing but ask for keys and values, beside those that compute (`attention/prefill_hopper.py`); 0: none do,
    and each warp loads what it needs. turns: 1: beside copiers, the two groups that compute begin their products in
    turns."""

    lines: int
    keys: int
    programs: int
    warps: int
    stages: int
    parts: int = 1
    part_keys: int = 512
    copiers: int = 0
    turns: int = 0

    def tokens(self, group: int) -> int:
        """Query tokens of a tile. group: query heads of a KV head, at most `lines`."""
        return self.lines // group


def chunk_plan(shape: AttentionShape, dtype: torch.dtype) -> ChunkPlan | None:
    """The plan that was measured for attention of this shape on this GPU; None where none was. A scale that is not
    above 0 has none either: the largest score must have the largest product."""
    gpu = current_gpu()
    name = None if gpu is None else gpu.measured_as(_tables())
    if name is None or dtype not in _HALVES or shape.scale <= 0:
        return None
    found = _tables()[name].get(plan_key(shape.heads, shape.kv_heads, shape.head_dim, dtype))
    return None if found is None else ChunkPlan(**found)


def plan_key(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """What the table calls a shape."""
    return f"{heads} heads, {kv_heads} KV heads of {head_dim}, {_HALVES[dtype]}"


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """By a GPU's name, then by `plan_key`."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text())
    return found
