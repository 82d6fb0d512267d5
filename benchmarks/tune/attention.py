"""Tries ways to cut the attention of decode launches on this GPU: `python -m benchmarks.tune.attention`.

It prints the best ones for each model and number of rows; `measured_plan` and `attention_plan` in the kernels'
`tilings.py` say what is used.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from benchmarks.tune.trial import READ_BYTES_PER_S, compile_side_by_side, graph_us, part_of
from runahead.runtime.kernels.layers import Attention, AttentionShape, Linear, Norm, RopeTable
from runahead.runtime.kernels.triton.decode_attention import decode_attention
from runahead.runtime.kernels.triton.decode_parts import make_part_buffers
from runahead.runtime.kernels.triton.decode_work import AttentionPlan, begin_decode
from runahead.runtime.rounding import ceil_div

SHAPES: Final = {  # heads, KV heads, head_dim, whether heads are normalised
    "0.6B": (16, 8, 128, True),
    "1B": (32, 8, 64, False),
    "8B": (32, 8, 128, False),
    "30B-A3B": (32, 4, 128, True),
    "7B-A1B": (12, 4, 128, False),
    "40B-A3B-delta": (16, 2, 256, True),
}
_BLOCK_SIZE: Final = 16
_GRAPH_BYTES: Final = 2e8  # of keys and values that a graph goes through
PROCESSORS: Final = 132


def plans(rows: int, kv_heads: int, head_dim: int, context: int) -> Iterator[AttentionPlan]:
    """Those whose tiles fit into registers or shared memory, with about as many items as programs."""
    for tile, parts, per, warps, stages, early in itertools.product(
        (32, 64, 128), (1, 2, 3, 4, 6, 8, 11, 16, 32), (2, 3, 4, 6), (1, 2, 4, 8), (1, 3, 4, 5), (True, False)
    ):
        chunk = ceil_div(ceil_div(context, tile), parts)
        items = rows * kv_heads * ceil_div(context, tile * chunk)
        registers = tile * head_dim * 4 / (32 * warps) if early else 0  # bytes of a thread
        shared = (stages - 2) * tile * head_dim * 4 if stages > 2 else 0
        if registers > 640 or (early and stages > 3) or not (early or stages > 2) or tile * 4 < warps * 64:
            continue
        if shared * per > 200 * 1024 or items > 3 * per * PROCESSORS or (chunk == 1) != (stages == 1):
            continue
        if rows > 1 and items < 0.4 * per * PROCESSORS:
            continue
        yield AttentionPlan(tile, chunk, per * PROCESSORS, warps, stages, early)


class Bench:
    """Attention of so many rows over several layers' caches by turns."""

    def __init__(self, name: str, rows: int, context: int, copies: int) -> None:
        heads, kv_heads, head_dim, normed = SHAPES[name]
        self.shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5)
        self.rows, self.context = rows, context
        blocks = ceil_div(context, _BLOCK_SIZE)
        cache = (rows * blocks + 1, _BLOCK_SIZE, kv_heads, head_dim)

        def random_tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        norm = Norm(random_tensor(head_dim), 1e-5) if normed else None
        unused = Linear(torch.empty(0), None)
        self.weights = Attention(self.shape, 0, Norm(torch.empty(0), 0.0), unused, norm, norm, unused)
        self.caches = [(random_tensor(*cache), random_tensor(*cache)) for _ in range(copies)]
        self.seq_lens = context - torch.arange(rows, device="cuda", dtype=torch.int32) % 7
        self.tables = (torch.randperm(rows * blocks, device="cuda", dtype=torch.int32) + 1).view(rows, blocks)
        self.qkv = random_tensor(rows, (heads + 2 * kv_heads) * head_dim)
        self.out = random_tensor(rows, heads * head_dim)
        angles = torch.rand(context, head_dim // 2, device="cuda")
        self.rope = RopeTable(angles.cos(), angles.sin())

    def us(self, plan: AttentionPlan) -> float:
        """Of one attention."""
        token_ids, table = torch.zeros(self.rows, dtype=torch.int64, device="cuda"), self.out[:1, :64].contiguous()
        windows = torch.zeros(1, dtype=torch.int32, device="cuda")
        work = begin_decode(token_ids, table, table.new_empty((self.rows, 64)), self.seq_lens, windows, plan)
        buffers = make_part_buffers(self.rows, self.shape, plan, self.context, self.out.device)

        def run() -> None:
            for keys, values in self.caches:
                decode_attention(
                    self.qkv, self.out, keys, values, self.tables, self.seq_lens, work.items[0], work.total[0],
                    self.rope, self.weights, plan, buffers, dependent=True,
                )  # fmt: skip

        return graph_us(run) / len(self.caches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--limit", type=int, default=60, help="plans of a model and a number of rows")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.compile is None:
        flags = [f"--{name}={getattr(chosen, name)}" for name in ("models", "rows", "context", "limit")]
        compile_side_by_side("benchmarks.tune.attention", flags)
    for name, rows in itertools.product(chosen.models.split(","), map(int, chosen.rows.split(","))):
        _, kv_heads, head_dim, _ = SHAPES[name]
        tried = list(plans(rows, kv_heads, head_dim, chosen.context))
        random.Random(rows).shuffle(tried)
        bytes_ = rows * chosen.context * kv_heads * head_dim * 4
        copies = 1 if chosen.compile else min(max(4, int(_GRAPH_BYTES / bytes_)), 64)
        time_of = partial(Bench.us, Bench(name, rows, chosen.context, copies))
        found: list[tuple[float, AttentionPlan]] = []
        for plan in tried[: chosen.limit][part_of(chosen.compile)]:
            try:
                found.append((time_of(plan), plan))
            except Exception as error:  # a plan that this GPU can't hold
                print("  ", plan, str(error)[:80].replace("\n", " "))
        if chosen.compile is None:
            found.sort(key=lambda one: one[0])
            print(f"{name}, {rows} rows of {chosen.context}: floor {bytes_ / READ_BYTES_PER_S * 1e6:.2f} µs")
            for took, plan in found[:6]:
                print(f"  {took:.2f} {plan}", flush=True)


if __name__ == "__main__":
    main()
