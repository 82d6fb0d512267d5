"""Tries ways to cut the attention of prompt chunks on this GPU: `python -m benchmarks.tune.chunk_attention`.

Each way is timed beside the attention that needs no plan, in several launches: prompts at their beginning and over a
long cache, alone and with decode rows. After each launch the way that is best so far and nowhere slower is compared
with the attention that needs no plan, number by number; it joins `measured_chunk_attention.json` beside the kernels, if
--out says so, and serves from the next start on. So a run that is cut off has left what it knew.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from benchmarks.tune.trial import ask_a_copy, compile_in_copies, graph_us, usable_cores
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import AttentionShape
from runahead.runtime.kernels.triton.chunk_attention import chunk_attention
from runahead.runtime.kernels.triton.chunk_plans import TABLE, ChunkPlan, plan_key
from runahead.runtime.kernels.triton.chunk_work import SPLIT_LAUNCH, cut_chunks, plan_of_launch
from runahead.runtime.kernels.triton.line_attention import line_attention
from runahead.runtime.kernels.triton.warp_attention import HEAD_DIMS as COPIED
from runahead.runtime.rounding import ceil_div

Shape = tuple[int, int, int]
SHAPES: Final[dict[str, Shape]] = {  # heads, KV heads, head_dim
    "0.6B": (16, 8, 128),
    "1B": (32, 8, 64),
    "8B": (32, 8, 128),
    "30B-A3B": (32, 4, 128),
    "7B-A1B": (12, 4, 128),
    "40B-A3B-delta": (16, 2, 256),
    "Gemma 3 12B": (16, 8, 256),
    "Phi-3 mini": (32, 32, 96),
}
_BLOCK_SIZE: Final = 16
_CLOSE: Final = 1e-2  # relative error that rounding to bfloat16 may make
_NO_SLOWER: Final = 1.03  # in any launch, beside the attention that needs no plan
_SLACK_US: Final = 8.0  # that a short launch may take longer: a quarter of a millisecond of a prompt, in 32 layers
_WINDOW: Final = 700  # of the windowed form that is compared
_COMPILE_S: Final = 60.0  # for all forms together; who is not ready then hangs
_SHARED: Final = 226 * 1024  # bytes of shared memory that programs of one processor may take together


@dataclass(frozen=True, slots=True)
class Launch:
    """A row for each: query tokens, and how many tokens it has in the cache before them."""

    name: str
    rows: tuple[tuple[int, int], ...]

    def flops(self, heads: int, head_dim: int) -> float:
        """Of both products, over what a query token sees."""
        seen = sum(count * before + count * (count + 1) / 2 for count, before in self.rows)
        return 4.0 * seen * heads * head_dim


LAUNCHES: Final = (  # what tells plans apart best comes first
    Launch("2048 behind 30k", ((2048, 30720),)),
    Launch("512 behind 31.5k", ((512, 32256),)),
    Launch("2048", ((2048, 0),)),
    Launch("32 rows and 480", (*((1, 1000),) * 32, (480, 1000))),
    Launch("8192", ((8192, 0),)),
    Launch("128 behind 31.5k", ((128, 32256),)),
    Launch("4 rows at 32k and 60", (*((1, 32000),) * 4, (60, 500))),
    Launch("128", ((128, 0),)),
    Launch("512", ((512, 0),)),
    Launch("32 rows at 8k and 2048", (*((1, 8000),) * 32, (2048, 4096))),
)
COMPARED: Final = (  # of at most SPLIT_LAUNCH query tokens, of more, and of more in one row
    Launch("compared", (*((1, 1500),) * 3, (300, 2000), (70, 0), (1, 0))),
    Launch("larger", ((1, 3000), (600, 100))),
    Launch("alone", ((600, 300),)),
)
assert sum(count for count, _ in COMPARED[0].rows) <= SPLIT_LAUNCH < min(COMPARED[1].rows[1][0], COMPARED[2].rows[0][0])


class Trial:
    """Attention of one shape in one launch, over a cache whose blocks lie in random order."""

    def __init__(self, shape: Shape, launch: Launch, device: str = "cuda") -> None:
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
            self.shape.scale, window,
        )  # fmt: skip

    def by_plan(self, plan: ChunkPlan, window: int = 0) -> torch.Tensor:
        plan = plan_of_launch(plan, self.batch)
        work = cut_chunks(self.batch, self.shape, plan)
        return line_attention(self.q, self.keys, self.values, self.batch, self.shape.scale, window, plan, work)

    def error(self, plan: ChunkPlan, window: int) -> float:
        """Of the plan, relative to the attention that needs none."""
        expected = self.by_default(window).float()
        return float((self.by_plan(plan, window).float() - expected).norm() / expected.norm())


def plans(head_dim: int, processors: int) -> Iterator[ChunkPlan]:
    """Tiles of two warpgroups, or of one with two programs a processor, as far as shared memory holds them: Triton
    keeps `stages` tiles of keys and of values. Each in one part, in 8 and in 16. First those with warps that copy, of
    heads that these know, also with parts of more tokens."""
    pad = max(64, 1 << (head_dim - 1).bit_length())
    if head_dim in COPIED:
        for (keys, stages), turns, parts in itertools.product(((128, 2), (128, 3), (64, 6)), (0, 1), (16, 1)):
            yield ChunkPlan(128, keys, processors, 8, stages, parts, copiers=1, turns=turns)
        for part_keys in (1024, 2048):
            yield ChunkPlan(128, 128, processors, 8, 3, 16, part_keys, copiers=1)
    for (lines, warps, each), keys, stages in itertools.product(
        ((128, 8, 1), (64, 4, 2)), (32, 64) if pad > 128 else (64, 128), (2, 3)
    ):
        shared = (lines + 2 * keys * stages) * pad * 2
        if each * shared > _SHARED or (warps == 4 and pad > 128):
            continue
        for parts in (8, 1, 16):
            yield ChunkPlan(lines, keys, each * processors, warps, stages, parts)


class Search:
    """The plans of one shape and how long each takes, launch by launch.

    names: of the launches. is_right: whether a plan gives what attention without one gives; asked of a plan only when
    it is the best, and once.
    """

    def __init__(self, tried: Sequence[ChunkPlan], is_right: Callable[[ChunkPlan], bool]) -> None:
        self.default: list[float] = []
        self.took: dict[ChunkPlan, list[float]] = {plan: [] for plan in tried}
        self._is_right = is_right
        self._right: dict[ChunkPlan, bool] = {}

    def time_launch(self, default_us: float, time_us: Callable[[ChunkPlan], float]) -> None:
        """One launch more. time_us: microseconds of a plan; what it raises puts the plan out."""
        self.default.append(default_us)
        for plan in list(self.took):
            try:
                self.took[plan].append(time_us(plan))
            except Exception as error:  # a plan that this GPU can't hold
                print(f"  can't run: {plan}: {str(error)[:100]!r}", flush=True)
                del self.took[plan]

    def ranked(self) -> list[ChunkPlan]:
        """The plans, those that took least over all launches so far first."""
        return sorted(self.took, key=lambda plan: math.prod(self.took[plan]))

    def best(self) -> ChunkPlan | None:
        """The fastest plan that is right, and in no launch so far slower than none is; None where there is none."""
        for plan in self.ranked():
            pairs = zip(self.took[plan], self.default, strict=True)
            if any(ours > max(_NO_SLOWER * theirs, theirs + _SLACK_US) for ours, theirs in pairs):
                continue
            if plan not in self._right:
                self._right[plan] = self._is_right(plan)
            if self._right[plan]:
                return plan
        return None


class Clock:
    """Seconds since this run began, before each line that it prints."""

    def __init__(self, seconds: float) -> None:
        self._begun, self._seconds = time.monotonic(), seconds

    def left(self) -> float:
        return self._begun + self._seconds - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8B,0.6B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--out", action="store_true", help="the best joins the table beside the kernels")
    parser.add_argument("--seconds", type=float, default=600.0, help="no launch is begun after them (%(default)s)")
    parser.add_argument("--shown", type=int, default=4, help="plans that are printed, besides the one without")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="that compile side by side (%(default)s)")
    parser.add_argument(
        "--copying", action="store_true", help="try only plans with warps that copy, and the one that the table has"
    )
    chosen = parser.parse_args()
    clock, names = Clock(chosen.seconds), chosen.shapes.split(",")
    processors = ask_a_copy(lambda: torch.cuda.get_device_properties(0).multi_processor_count)
    tried = {name: _tried(SHAPES[name], processors, chosen.copying) for name in names}
    forms = [
        (SHAPES[name], plan, launch, window)
        for window, name in itertools.product((0, _WINDOW), names)
        for plan in (None, *tried[name])
        for launch in COMPARED
    ]
    clock.say(f"{', '.join(names)}: {chosen.workers} workers compile {len(forms)} forms")
    failed = compile_in_copies(lambda part: _compile(forms[part], clock), chosen.workers, min(clock.left(), _COMPILE_S))
    clock.say("compiled" + (f", but for what workers {failed} had to do" if failed else ""))
    for name in names:
        left_out = {
            plan for i in failed for shape, plan, _, _ in forms[i :: chosen.workers] if shape == SHAPES[name] and plan
        }
        _tune(name, [plan for plan in tried[name] if not (plan.copiers and plan in left_out)], clock, chosen)


def _tried(shape: Shape, processors: int, copying: bool) -> list[ChunkPlan]:
    """copying: see the flag."""
    found = list(plans(shape[2], processors))
    if not copying:
        return found
    key = plan_key(*shape, torch.bfloat16)
    known = {ChunkPlan(**of_gpu[key]) for of_gpu in json.loads(TABLE.read_text()).values() if key in of_gpu}
    return [plan for plan in found if plan.copiers or plan in known]


def _tune(name: str, tried: Sequence[ChunkPlan], clock: Clock, chosen: argparse.Namespace) -> None:
    shape, gpu = SHAPES[name], torch.cuda.get_device_name()
    key = plan_key(*shape, torch.bfloat16)
    before = table_entry(TABLE, gpu, key)
    search = Search(tried, lambda plan: _is_right(shape, plan))
    for done, launch in enumerate(LAUNCHES):
        if clock.left() < 0:
            clock.say(f"{name}: the time is up; not timed: {', '.join(one.name for one in LAUNCHES[done:])}")
            break
        trial = Trial(shape, launch)
        search.time_launch(graph_us(trial.by_default), lambda plan, trial=trial: graph_us(lambda: trial.by_plan(plan)))  # type: ignore[misc]
        del trial
        torch.cuda.empty_cache()
        fastest = min((times[-1] for times in search.took.values()), default=math.inf)
        clock.say(
            f"{name}, {launch.name}: no plan {_rated(search.default[-1], launch, shape)}, the fastest "
            f"{_rated(fastest, launch, shape)} microseconds (TFLOP/s)"
        )
        best = search.best()
        clock.say(f"{name}: the best of {len(search.took)} so far: {best or 'none is nowhere slower, and right'}")
        if chosen.out:
            join_table(TABLE, gpu, key, before if best is None else asdict(best))
    _show(name, shape, search, chosen.shown)


def _rated(us: float, launch: Launch, shape: Shape) -> str:
    heads, _, head_dim = shape
    return f"{us:.0f} ({launch.flops(heads, head_dim) / us / 1e6:.0f})"


def _show(name: str, shape: Shape, search: Search, shown: int) -> None:
    """Microseconds and TFLOP/s of the best plans and of none; then the fastest plan of each launch."""
    launches = LAUNCHES[: len(search.default)]
    print(f"{name}: microseconds (TFLOP/s) of {', '.join(launch.name for launch in launches)}")
    best = [(str(plan), search.took[plan]) for plan in search.ranked()[:shown]]
    for title, times in (("no plan", search.default), *best):
        cells = [_rated(us, launch, shape) for us, launch in zip(times, launches, strict=True)]
        print(f"  {', '.join(cells)}  {title}", flush=True)
    for i, launch in enumerate(launches):
        plan = min(search.took, key=lambda plan: search.took[plan][i], default=None)
        if plan is not None:
            print(f"  fastest of {launch.name}: {search.took[plan][i]:.0f} {plan}", flush=True)


def _compile(forms: Sequence[tuple[Shape, ChunkPlan | None, Launch, int]], clock: Clock) -> None:
    """A worker's part of every form that will run: over short and long launches, then with a window. It ends with an
    error where one whose warps copy could not run, so that nobody else tries it."""
    torch.set_num_threads(1)
    trials: dict[tuple[Shape, Launch], Trial] = {}
    failed = False
    for shape, plan, launch, window in forms:
        try:
            if (shape, launch) not in trials:
                trials[shape, launch] = Trial(shape, launch)
            trial = trials[shape, launch]
            if plan is None:
                trial.by_default(window)
            else:
                trial.by_plan(plan, window)
                if plan.copiers:
                    torch.cuda.synchronize()
        except Exception as error:  # a plan that this GPU can't hold
            clock.say(f"not compiled: {plan}: {str(error)[:100]!r}")
            failed = failed or (plan is not None and plan.copiers > 0)
    if failed:
        raise SystemExit("a program whose warps copy failed")
    torch.cuda.synchronize()


def _is_right(shape: Shape, plan: ChunkPlan) -> bool:
    """Does it agree with the attention that needs no plan, with parts and a window too?"""
    try:
        errors = [Trial(shape, launch).error(plan, window) for launch in COMPARED for window in (0, _WINDOW)]
    except Exception as error:
        print(f"  can't run: {plan}: {str(error)[:100]!r}", flush=True)
        return False
    if max(errors) > _CLOSE or any(map(math.isnan, errors)):
        print(f"  WRONG: {plan}: relative errors {', '.join(f'{error:.1e}' for error in errors)}", flush=True)
        return False
    return True


def table_entry(table: Path, gpu: str, key: str) -> dict[str, int] | None:
    """What the table says of a shape on a GPU."""
    found: dict[str, dict[str, dict[str, int]]] = json.loads(table.read_text())
    return found.get(gpu, {}).get(key)


def join_table(table: Path, gpu: str, key: str, plan: dict[str, int] | None) -> None:
    """Write a plan into the table, or take it out; what stands there of others stays."""
    with table.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # runs for several shapes may write it
        found: dict[str, dict[str, dict[str, int]]] = json.load(file)
        if plan is None:
            found.get(gpu, {}).pop(key, None)
        else:
            found.setdefault(gpu, {})[key] = plan
        file.seek(0)
        file.write(json.dumps({one: found[one] for one in found if found[one]}, indent=1, sort_keys=True) + "\n")
        file.truncate()


if __name__ == "__main__":
    main()
