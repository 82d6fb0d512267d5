"""The part about launches that verify drafts. It runs no engine."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.draft_launches import DRAFTS, LaunchBench, context_of, device_for, opened_launches
from benchmarks.gpu_table.draft_results import ModelKind, VerifiedLaunch
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.floors import StepBytes, step_bytes
from benchmarks.gpu_table.found import Found
from benchmarks.gpu_table.measured import Measured
from benchmarks.gpu_table.settings import Settings
from benchmarks.gpu_table.shapes import Shape

VERIFIED_ROWS: Final = 64  # at most, of a launch that verifies drafts


@dataclass(frozen=True, slots=True)
class _Verified:
    """Of both kinds of launches, as a `VerifiedLaunch` has it."""

    experts: tuple[float, float]
    runs_ms: tuple[tuple[float, float], ...]
    nodes: tuple[int, int] | None
    drafter_us: float


def verify_part(shape: Shape, run: Run) -> Found:
    """Launches that verify DRAFTS drafts of each row, beside plain ones. Raises BenchmarkError for a setting other than
    `exact`."""
    device, exact = device_for(run.device), _exact(run)
    batches = [rows for rows in shape.batches if rows <= VERIFIED_ROWS]
    dtype = torch.float32 if run.device == "cpu" else shape.described().dtype
    bytes_, found = step_bytes(shape.described(), dtype), list[VerifiedLaunch]()
    with Measured(lambda: opened_launches(shape, device, batches[-1], exact), lambda bench: True) as measured:
        context = measured.subject.context
        for rows in batches:
            one, skipped = None, run.why_no_more
            if not skipped:
                one, skipped = measured.measure(partial(_verified, rows=rows, repeats=run.repeats))
            found.append(_as_result(shape, bytes_, rows, exact, context, one, skipped))
            print(f"{run.took_s:6.1f} s  {_said(found[-1])}", file=sys.stderr, flush=True)
    return Found(_settings(exact, shape), verified=found, failures=measured.failures)


def _verified(bench: LaunchBench, rows: int, repeats: int) -> _Verified:
    nodes = bench.capture(rows)
    experts = bench.experts_named(rows, 0), bench.experts_named(rows, DRAFTS)
    runs = tuple((bench.step_ms(rows, 0), bench.step_ms(rows, DRAFTS)) for _ in range(repeats))
    return _Verified(experts, runs, nodes, bench.drafter_us(rows))


def _as_result(
    shape: Shape, bytes_: StepBytes, rows: int, exact: bool, context: float, one: _Verified | None, skipped: str
) -> VerifiedLaunch:
    kind: ModelKind = "experts" if bytes_.expert else "states" if bytes_.state else "dense"
    known = VerifiedLaunch(
        shape=shape.name, kind=kind, rows=rows, drafts=DRAFTS, exact=exact, context=context, skipped=skipped
    )  # fmt: skip
    if one is None:
        return known
    plain, verified = (statistics.median(each) for each in zip(*one.runs_ms, strict=True))
    floors = [bytes_.floor_ms(context * rows, named, rows) for named in one.experts]
    return VerifiedLaunch(
        shape=shape.name, kind=kind, rows=rows, drafts=DRAFTS, exact=exact, context=context,
        floor_plain_ms=floors[0], floor_verified_ms=floors[1],
        experts_plain=one.experts[0], experts_verified=one.experts[1],
        plain_ms=plain, verified_ms=verified, runs_ms=one.runs_ms, nodes=one.nodes, drafter_us=one.drafter_us,
    )  # fmt: skip


def _said(one: VerifiedLaunch) -> str:
    what = f"{one.shape} {one.rows} rows, {one.drafts} drafts"
    if one.plain_ms is None:
        return f"{what}: {one.skipped}"
    named = f", experts {one.experts_plain:.1f} and {one.experts_verified:.1f}" if one.experts_plain else ""
    return (
        f"{what}: {one.verified_ms:.3f} ms, plain {one.plain_ms:.3f}; floors {one.floor_verified_ms:.3f} and "
        f"{one.floor_plain_ms:.3f}{named}"
    )


def _exact(run: Run) -> bool:
    if others := sorted(run.asked.keys() - {"exact"}):
        raise BenchmarkError(f"--set {others[0]}: this part runs no engine, and knows the setting exact alone")
    return run.asked.get("exact") == "on"


def _settings(exact: bool, shape: Shape) -> Settings:
    return {"exact_kernels": exact, "drafts": DRAFTS, "context_length": context_of(shape.workload)}
