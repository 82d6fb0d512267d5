"""The part about a model that several GPUs have between them."""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.gpu_table.cells import Cells, Run
from benchmarks.gpu_table.decode import Batch, through_the_engine
from benchmarks.gpu_table.floors import step_bytes
from benchmarks.gpu_table.found import Found, measured_engine
from benchmarks.gpu_table.prompt_parts import prompt_time
from benchmarks.gpu_table.prompts import SETTINGS, of_long_prompts
from benchmarks.gpu_table.settings import RUN_AHEAD
from benchmarks.gpu_table.shapes import Shape
from runahead.runtime.rounding import ceil_div

_FIRST: Final = 8192  # tokens of the prompt whose first token is timed


def rank_part(shape: Shape, ranks: int, run: Run) -> Found:
    """Decode steps through the engine, everybody greedy, and first tokens of one length. Floors are those of one GPU
    that reads everything."""
    workload, most = shape.workload, shape.batches[-1]
    context = max(workload.context, 256 * ceil_div(_FIRST + 1, 256))
    shape = of_long_prompts(shape, context)
    settings = run.settings(most, context) | SETTINGS["rate"] | {"tensor_parallel": ranks} | run.asked
    config = shape.described()
    with measured_engine(shape, settings, RUN_AHEAD, (workload.prompt,) * most) as measured:
        cells = Cells(run, "step", shape, step_bytes(config, config.dtype), measured)
        found = measured.subject.settings
        for rows in shape.batches:
            batch = Batch((workload.prompt,) * rows, "greedy")
            cells.add(batch, partial(through_the_engine, batch=batch, repeats=run.repeats), way="engine")
        first = prompt_time(measured, run, shape, "rate", _FIRST, 0)
    return Found(found, cells.found, prompts=[first], failures=measured.failures)
