"""The part about a model that several GPUs have between them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from benchmarks.gpu_table.cells import Cells, Run
from benchmarks.gpu_table.decode import Batch, through_the_engine
from benchmarks.gpu_table.floors import step_bytes
from benchmarks.gpu_table.found import Found, measured_engine
from benchmarks.gpu_table.prompt_parts import prompt_time
from benchmarks.gpu_table.prompts import SETTINGS, of_long_prompts
from benchmarks.gpu_table.results import Cell, PromptTime
from benchmarks.gpu_table.settings import RUN_AHEAD, Settings
from benchmarks.gpu_table.shapes import Shape
from runahead.runtime.rounding import ceil_div

_FIRST: Final = 8192  # tokens of the prompt whose first token is timed


def rank_part(shape: Shape, ranks: int, run: Run) -> Found:
    """Decode steps through the engine, everybody greedy, and first tokens of one length: on several GPUs, then on one.
    Floors are of one GPU that reads everything."""
    found: list[Cell] = []
    prompts: list[PromptTime] = []
    failures: list[str] = []
    settings: Settings = {}
    workload, most = shape.workload, shape.batches[-1]
    context = max(workload.context, 256 * ceil_div(_FIRST + 1, 256))
    for count in (ranks, 1):
        named = of_long_prompts(replace(shape, name=f"{shape.name} tp{count}"), context)
        asked = run.settings(most, context) | SETTINGS["rate"] | {"tensor_parallel": count} | run.asked
        config = named.described()
        with measured_engine(named, asked, RUN_AHEAD, (workload.prompt,) * most) as measured:
            cells = Cells(run, "step", named, step_bytes(config, config.dtype), measured)
            settings = settings or measured.subject.settings
            for rows in named.batches:
                batch = Batch((workload.prompt,) * rows, "greedy")
                cells.add(batch, partial(through_the_engine, batch=batch, repeats=run.repeats), way="engine")
            prompts.append(prompt_time(measured, run, named, "rate", _FIRST, 0))
        found += cells.found
        failures += measured.failures
    return Found(settings, found, prompts=prompts, failures=failures)
