"""The part about prompts: first tokens."""

from __future__ import annotations

import sys

from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.found import Found, measured_engine
from benchmarks.gpu_table.measured import Measured
from benchmarks.gpu_table.prompts import (
    SETTINGS,
    FirstTokens,
    Setting,
    busy,
    first_tokens,
    of_long_prompts,
    products_ms,
)
from benchmarks.gpu_table.results import PromptTime
from benchmarks.gpu_table.settings import Settings
from benchmarks.gpu_table.shapes import Shape
from runahead.runtime.rounding import ceil_div


def _up_to(tokens: int) -> int:
    """A context that holds so many tokens, in blocks of any size up to 256."""
    return 256 * ceil_div(tokens + 1, 256)


def first_token_part(shape: Shape, run: Run) -> Found:
    """First tokens, alone and beside rows that decode, with the engine set for one and for the other."""
    workload = shape.workload
    context = _up_to(workload.first[-1])
    shape = of_long_prompts(shape, context)
    found: list[PromptTime] = []
    failures: list[str] = []
    settings: Settings = {}
    for setting, wanted in SETTINGS.items():
        settings = run.settings(workload.beside + 8, context) | wanted | run.asked
        with measured_engine(shape, settings) as measured:
            settings = measured.subject.settings
            for rows in (0, workload.beside):
                for tokens in workload.first:
                    found.append(prompt_time(measured, run, shape, setting, tokens, rows))
            together, tokens = workload.together
            found.append(prompt_time(measured, run, shape, setting, tokens, workload.beside, together))
        failures += measured.failures
    same = {name: value for name, value in settings.items() if name not in SETTINGS["rate"]}
    varied: Settings = {
        setting: " ".join(f"{name}={value}" for name, value in own.items()) for setting, own in SETTINGS.items()
    }
    return Found({**same, **varied}, prompts=found, failures=failures)


def prompt_time(
    measured: Measured[Bench], run: Run, shape: Shape, setting: Setting, tokens: int, rows: int,
    together: int = 1,
) -> PromptTime:  # fmt: skip
    def measure(bench: Bench) -> FirstTokens:
        with busy(bench, rows):
            return first_tokens(bench, tokens, run.repeats, together)

    times, skipped = (None, run.why_no_more) if run.why_no_more else measured.measure(measure)
    time = PromptTime(
        shape=shape.name,
        setting=setting,
        tokens=tokens,
        rows=rows,
        together=together,
        products_ms=products_ms(shape.described(), together * tokens),
        first_token_ms=None if times is None else times.median_ms,
        met_ms=None if times is None else times.met_ms,
        runs_ms=() if times is None else times.runs_ms,
        gap_p50_ms=None if times is None else times.gap_ms(50),
        gap_p99_ms=None if times is None else times.gap_ms(99),
        idle_between=None if times is None else times.idle.between,
        idle_inside=None if times is None else times.idle.inside,
        skipped=skipped,
    )
    shown = skipped or f"{time.first_token_ms:.1f} ms, products {time.products_ms:.1f}"
    what = f"prompt of {tokens:,}" if together == 1 else f"{together} prompts of {tokens:,}"
    print(f"{run.took_s:6.1f} s  {shape.name} {what} beside {rows}, {setting}: {shown}", file=sys.stderr, flush=True)
    return time
