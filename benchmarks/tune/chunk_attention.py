"""Tries ways to cut the attention of prompt chunks on this GPU: `python -m benchmarks.tune.chunk_attention`.

Each way is first compared with the attention that needs no plan, and then timed beside it in several launches: prompts
at their beginning and over a long cache, alone and with decode rows. The best way that is nowhere slower joins
`measured_chunk_attention.json` beside the kernels, if --out says so, and serves from the next start on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from benchmarks.tune.trial import compile_side_by_side, graph_us, part_of
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.chunk_attention import chunk_attention
from runahead.runtime.kernels.triton.chunk_plans import TABLE, ChunkPlan, plan_key
from runahead.runtime.kernels.triton.chunk_work import cut_chunks
from runahead.runtime.kernels.triton.line_attention import line_attention
from runahead.runtime.rounding import ceil_div

SHAPES: Final = {  # heads, KV heads, head_dim
    "0.6B": (16, 8, 128),
    "1B": (32, 8, 64),
    "8B": (32, 8, 128),
    "Gemma 3 12B": (16, 8, 256),
    "Phi-3 mini": (32, 32, 96),
}
_BLOCK_SIZE: Final = 16
_CLOSE: Final = 1e-2  # relative error that rounding to bfloat16 may make
_NO_SLOWER: Final = 1.03  # in any launch, beside the attention that needs no plan


@dataclass(frozen=True, slots=True)
class Launch:
    """A row for each: query tokens, and how many tokens it has in the cache before them."""

    name: str
    rows: tuple[tuple[int, int], ...]

    def flops(self, heads: int, head_dim: int) -> float:
        """Of both products, over what a query token sees."""
        seen = sum(count * before + count * (count + 1) / 2 for count, before in self.rows)
        return 4.0 * seen * heads * head_dim


LAUNCHES: Final = (
    Launch("128", ((128, 0),)),
    Launch("512", ((512, 0),)),
    Launch("512 behind 31.5k", ((512, 32256),)),
    Launch("2048", ((2048, 0),)),
    Launch("2048 behind 30k", ((2048, 30720),)),
    Launch("8192", ((8192, 0),)),
    Launch("32 rows and 480", (*((1, 1000),) * 32, (480, 1000))),
    Launch("32 rows at 8k and 2048", (*((1, 8000),) * 32, (2048, 4096))),
)


class Trial:
    """Attention of one shape in one launch, over a cache whose blocks lie in random order."""

    def __init__(self, shape: tuple[int, int, int], launch: Launch, device: str = "cuda") -> None:
        heads, kv_heads, head_dim = shape
        self.shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5)
        counts = torch.tensor([count for count, _ in launch.rows], dtype=torch.int32)
        lengths = torch.tensor([sum(row) for row in launch.rows], dtype=torch.int32)
        blocks = [ceil_div(int(length), _BLOCK_SIZE) for length in lengths]
        tables = torch.zeros((len(blocks), max(blocks)), dtype=torch.int32)
        order = (torch.randperm(sum(blocks)) + 1).int().split(blocks)
        for row, mine in enumerate(order):
            tables[row, : mine.numel()] = mine
        unused = torch.zeros(0, dtype=torch.int64)
        total = int(counts.sum())
        self.batch = ForwardBatch(
            token_ids=unused,
            positions=unused,
            slot_mapping=unused,
            query_start_loc=torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)).to(device),
            seq_lens=lengths.to(device),
            block_tables=tables.to(device),
            num_tokens=total,
            num_rows=len(blocks),
            max_seq_len=int(lengths.max()),
            is_decode=False,
        )
        cache = (sum(blocks) + 1, _BLOCK_SIZE, kv_heads, head_dim)
        self.q = torch.randn((total, heads, head_dim), device=device, dtype=torch.bfloat16)
        self.keys, self.values = (torch.randn(cache, device=device, dtype=torch.bfloat16) for _ in range(2))

    def by_default(self, window: int = 0) -> torch.Tensor:
        batch = self.batch
        return chunk_attention(
            self.q, self.keys, self.values, batch.block_tables, batch.seq_lens, batch.query_start_loc,
            batch.max_queries, self.shape.scale, window,
        )  # fmt: skip

    def by_plan(self, plan: ChunkPlan, window: int = 0) -> torch.Tensor:
        work = cut_chunks(self.batch, self.shape, plan)
        return line_attention(self.q, self.keys, self.values, self.batch, self.shape.scale, window, plan, work)

    def error(self, plan: ChunkPlan, window: int) -> float:
        """Of the plan, relative to the attention that needs none."""
        expected = self.by_default(window).float()
        return float((self.by_plan(plan, window).float() - expected).norm() / expected.norm())


def plans(head_dim: int, processors: int) -> Iterator[ChunkPlan]:
    """Those whose tiles fit into shared memory. Triton holds `stages` tiles of keys and of values."""
    width = max(64, 1 << (head_dim - 1).bit_length()) * 2  # bytes
    for (lines, warps, each), keys, stages, parts in itertools.product(
        ((128, 8, 1), (64, 4, 2), (128, 4, 1)), (32, 64, 128), (2, 3, 4), (1, 8)
    ):
        shared = (lines + 2 * keys * stages) * width
        if each * shared > 226 * 1024 or (keys == 32 and head_dim < 256) or (warps == 4 and head_dim > 128):
            continue
        yield ChunkPlan(lines, keys, each * processors, warps, stages, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8B,0.6B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--out", action="store_true", help="the best joins the table beside the kernels")
    parser.add_argument("--shown", type=int, default=4, help="plans that are printed, besides the one without")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.compile is None:
        compile_side_by_side("benchmarks.tune.chunk_attention", [f"--shapes={chosen.shapes}"])
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for name in chosen.shapes.split(","):
        heads, kv_heads, head_dim = SHAPES[name]
        tried = list(plans(head_dim, processors))
        if chosen.compile is not None:
            _compile(SHAPES[name], tried[part_of(chosen.compile)])
            continue
        right = [plan for plan in tried if _is_right(SHAPES[name], plan)]
        best = _timed(name, SHAPES[name], right, chosen.shown)
        if best is not None and chosen.out:
            join_table(TABLE, torch.cuda.get_device_name(), plan_key(heads, kv_heads, head_dim, torch.bfloat16), best)


def _compile(shape: tuple[int, int, int], tried: Sequence[ChunkPlan]) -> None:
    trial = Trial(shape, LAUNCHES[0])
    for plan in tried:
        try:
            trial.by_plan(plan)
        except Exception as error:  # a plan that this GPU can't hold
            print("  ", plan, str(error)[:100].replace("\n", " "), flush=True)


def _is_right(shape: tuple[int, int, int], plan: ChunkPlan) -> bool:
    """Does it agree with the attention that needs no plan, with parts and a window too?"""
    checked = Launch("checked", (*((1, 1500),) * 3, (300, 2000), (70, 0), (1, 0)))
    larger = Launch("larger", ((1, 3000), (600, 100)))
    try:
        errors = [Trial(shape, launch).error(plan, window) for launch in (checked, larger) for window in (0, 700)]
    except Exception as error:
        print(f"  can't run: {plan}: {str(error)[:100]!r}", flush=True)
        return False
    if max(errors) > _CLOSE or any(map(math.isnan, errors)):
        print(f"  WRONG: {plan}: relative errors {', '.join(f'{error:.1e}' for error in errors)}", flush=True)
        return False
    return True


def _timed(name: str, shape: tuple[int, int, int], tried: Sequence[ChunkPlan], shown: int) -> ChunkPlan | None:
    """Prints TFLOP/s of the best plans and of none; the best plan that is nowhere slower than none."""
    heads, _, head_dim = shape
    default: list[float] = []
    took: dict[ChunkPlan, list[float]] = {plan: [] for plan in tried}
    for launch in LAUNCHES:
        trial = Trial(shape, launch)
        default.append(graph_us(lambda trial=trial: trial.by_default()))  # type: ignore[misc]
        for plan in tried:
            took[plan].append(graph_us(lambda trial=trial, plan=plan: trial.by_plan(plan)))  # type: ignore[misc]
        del trial
        torch.cuda.empty_cache()
    ranked = sorted(tried, key=lambda plan: math.prod(took[plan]))
    print(f"{name}: microseconds (TFLOP/s) of {', '.join(launch.name for launch in LAUNCHES)}")
    for title, times in (("no plan", default), *((str(plan), took[plan]) for plan in ranked[:shown])):
        cells = [
            f"{us:.0f} ({launch.flops(heads, head_dim) / us / 1e6:.0f})"
            for us, launch in zip(times, LAUNCHES, strict=True)
        ]
        print(f"  {', '.join(cells)}  {title}", flush=True)
    for launch, *times in zip(LAUNCHES, *took.values(), strict=True):
        fastest = min(range(len(tried)), key=lambda i: times[i])
        print(f"  fastest of {launch.name}: {times[fastest]:.0f} {tried[fastest]}", flush=True)
    for plan in ranked:
        if all(ours <= _NO_SLOWER * theirs for ours, theirs in zip(took[plan], default, strict=True)):
            return plan
    print("  no plan is nowhere slower")
    return None


def join_table(table: Path, gpu: str, key: str, plan: ChunkPlan) -> None:
    """Write a plan into the table; what stands there of others stays."""
    found: dict[str, dict[str, dict[str, int]]] = json.loads(table.read_text())
    found.setdefault(gpu, {})[key] = asdict(plan)
    table.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
