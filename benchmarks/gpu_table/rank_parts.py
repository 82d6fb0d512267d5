"""The parts about a model that several GPUs have between them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from benchmarks.gpu_table.cells import Cells, Run
from benchmarks.gpu_table.decode import Batch, through_the_engine
from benchmarks.gpu_table.expert_counts import experts_named
from benchmarks.gpu_table.floors import step_bytes
from benchmarks.gpu_table.found import Found, measured_engine
from benchmarks.gpu_table.prompt_parts import prompt_time
from benchmarks.gpu_table.prompts import SETTINGS, of_long_prompts
from benchmarks.gpu_table.results import Cell, PromptTime
from benchmarks.gpu_table.settings import RUN_AHEAD, Settings
from benchmarks.gpu_table.shapes import Shape
from runahead.runtime.models.weights import described
from runahead.runtime.rounding import ceil_div

FIRST: Final = (8192, 32768)  # tokens of the prompts whose first token is timed
_ONE_GPU: Final = 120 << 30  # bytes of weights beside which one GPU has room for a cache


def rank_part(shape: Shape, ranks: int, run: Run) -> Found:
    """Decode steps through the engine, everybody greedy, and first tokens: on several GPUs, then on one that has the
    memory for it, unless `run.ranks_only`. Floors are of GPUs that read equal parts, of each expert that is named too.
    """
    found: list[Cell] = []
    prompts: list[PromptTime] = []
    failures: list[str] = []
    settings: Settings = {}
    workload, most = shape.workload, shape.batches[-1]
    context = max(workload.context, 256 * ceil_div(FIRST[-1] + 1, 256))
    config = shape.described()
    fits_one = described(config).parameters * config.dtype.itemsize < _ONE_GPU
    for count in (ranks, 1) if fits_one and not run.ranks_only else (ranks,):
        if found and run.why_no_more:
            failures.append(f"one GPU was not measured: {run.why_no_more}")
            break
        named = of_long_prompts(replace(shape, name=f"{shape.name} tp{count}"), context)
        asked = run.settings(most, context) | SETTINGS["rate"] | {"tensor_parallel": count} | run.asked
        bytes_ = replace(step_bytes(config, config.dtype), gpus=count)
        with measured_engine(named, asked, RUN_AHEAD, (workload.prompt,) * most) as measured:
            cells = Cells(run, "step", named, bytes_, measured)
            settings = settings or measured.subject.settings
            for rows in named.batches:
                batch = Batch((workload.prompt,) * rows, "greedy")
                experts, lacks = measured.measure(partial(experts_named, batch=batch))
                timed = partial(through_the_engine, batch=batch, repeats=run.repeats)
                cells.add(batch, timed, lacks=lacks, experts=experts or None, way="engine")
            prompts += [prompt_time(measured, run, named, "rate", tokens, 0) for tokens in FIRST]
        found += cells.found
        failures += measured.failures
    return Found(settings, found, prompts=prompts, failures=failures)
