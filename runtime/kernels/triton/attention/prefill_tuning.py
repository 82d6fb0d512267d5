"""Measured plans of prefill attention.

`measured_chunk_attention.json` was measured on an H200. A plan sets the order in which keys are folded, so `runahead
tune` does not change it. Shapes and GPUs without an entry (`Gpu.measured_as`) use `chunk_attention` with tiles of 32
query tokens of one head.
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
    """A split of prefill attention. lines: of a program's tile: pairs of a query token and a query head of one KV head.
    keys: tokens of a KV tile. programs: that process the items. stages: KV tiles in flight. copiers: producer warps of
    a program beside the computing ones (`attention/prefill_hopper.py`); 0: each warp loads its data.
    """

    lines: int
    keys: int
    programs: int
    warps: int
    stages: int
    copiers: int = 0

    def tokens(self, group: int) -> int:
        """Return the query tokens of a tile. group: query heads of a KV head, at most `lines`."""
        return self.lines // group


def chunk_plan(shape: AttentionShape, dtype: torch.dtype) -> ChunkPlan | None:
    """Return the plan measured for this shape on this GPU; None without one, or if the scale is not above 0: the
    largest score must have the largest product.
    """
    gpu = current_gpu()
    name = None if gpu is None else gpu.measured_as(_tables())
    if name is None or dtype not in _HALVES or shape.scale <= 0:
        return None
    found = _tables()[name].get(plan_key(shape.heads, shape.kv_heads, shape.head_dim, dtype))
    return None if found is None else ChunkPlan(**found)


def plan_key(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """Return a shape's key in the table."""
    return f"{heads} heads, {kv_heads} KV heads of {head_dim}, {_HALVES[dtype]}"


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Load the tables, by GPU name and `plan_key`."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text())
    return found
