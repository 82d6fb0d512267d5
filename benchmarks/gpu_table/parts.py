"""The parts of the benchmark: each runs in a separate process, in less than 8 minutes on one H200."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

import numpy as np
import torch

from benchmarks.gpu_table import results
from benchmarks.gpu_table.cells import Cells, Run
from benchmarks.gpu_table.decode import Batch, Steps, bare_graphs, fill_cache, form_of, through_the_engine
from benchmarks.gpu_table.engines import Bench
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.expert_counts import experts_named
from benchmarks.gpu_table.floors import StepBytes, step_bytes
from benchmarks.gpu_table.found import DEPTHS, Found, measured_engine
from benchmarks.gpu_table.kernel_times import LAUNCHES, on_the_gpu, traced
from benchmarks.gpu_table.prompt_parts import first_token_part
from benchmarks.gpu_table.rank_parts import rank_part
from benchmarks.gpu_table.results import Cell, Result, Sampling, Table
from benchmarks.gpu_table.settings import Settings
from benchmarks.gpu_table.shapes import SHAPES, Shape
from runahead.cuda_graphs.device import Form
from runahead.runtime.models.memory import FP8_KV
from runahead.runtime.wire.engine_config import DeviceName

MOST_ROWS: Final = 64  # of the tables that leave out the largest batch
_MODELS: Final = "decode steps of models with experts or recurrent states, beside the bytes that they need"
Forms = Mapping[str, Settings]
_PLAIN: Final[Forms] = {"": {}}
_EVERYBODY: Final[tuple[Sampling, ...]] = ("greedy", "sampled")
_ONE_AMONG: Final[tuple[Sampling, ...]] = ("one sampled", "one with log-probabilities")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark. minutes: on an H200, about. is_wanted: it runs by default."""

    name: str
    what: str
    minutes: int
    measure: Callable[[Run], Found]
    is_wanted: bool


def run_part(part: Part, run: Run) -> Result:
    """Measure everything that belongs to the part."""
    found = part.measure(run)
    asked = ", ".join(f"{name}={value}" for name, value in sorted(run.asked.items()))
    return Result(
        format=results.FORMAT,
        part=part.name,
        commit=run.commit,
        date=results.now(),
        seconds=round(run.took_s, 1),
        machine=results.this_machine(run.device),
        versions=results.these_versions(),
        settings=found.settings | {"repeats": run.repeats, "asked": asked},
        cells=tuple(found.cells),
        breakdowns=tuple(found.breakdowns),
        prompts=tuple(found.prompts),
        failure="; ".join(found.failures),
    )


def _bytes_on(device: DeviceName, shape: Shape) -> StepBytes:
    """In the dtype that the device computes in where no other is asked for."""
    return step_bytes(shape.described(), _dtype_on(device, shape))


def _dtype_on(device: DeviceName, shape: Shape) -> torch.dtype:
    return torch.float32 if device == "cpu" else shape.described().dtype


# ------------------------------------------------------------ what the parts measure


def _nodes(bench: Bench, batches: Sequence[int]) -> Mapping[tuple[int, Form], int | None]:
    """Return the number of nodes of each graph, by rows and form."""
    return {(rows, form): bench.nodes(rows, form) for rows in batches for form in Form}


def _step(shape: Shape, run: Run) -> Found:
    """Bare graphs and the engine, everybody greedy and everybody sampled, and one row that asks for more."""
    prompt, most = shape.workload.prompt, shape.batches[-1]
    settings = run.settings(most, shape.workload.context)
    with measured_engine(shape, settings, shape.workload.chained, (prompt,) * most) as measured:
        cells = Cells(run, "step", shape, _bytes_on(run.device, shape), measured)
        found, nodes = measured.subject.settings, _nodes(measured.subject, shape.batches)
        for sampling in _EVERYBODY:
            for rows in shape.batches:
                batch, count = Batch((prompt,) * rows, sampling), nodes[rows, form_of(sampling)]
                cells.add(batch, partial(bare_graphs, batch=batch, repeats=run.repeats), way="graph", nodes=count)
                cells.add(
                    batch, partial(through_the_engine, batch=batch, repeats=run.repeats), way="engine", nodes=count
                )
        rows = min(most, MOST_ROWS)
        for sampling in _ONE_AMONG:
            batch, count = Batch((prompt,) * rows, sampling), nodes[rows, form_of(sampling)]
            cells.add(batch, partial(through_the_engine, batch=batch, repeats=run.repeats), way="engine", nodes=count)
    return Found(found, cells.found, failures=measured.failures)


def _lengths(shape: Shape, run: Run) -> Found:
    """Long contexts, and prompts of many lengths in one batch."""
    workload = shape.workload
    batches = [rows for rows in shape.batches if rows <= MOST_ROWS]
    with measured_engine(shape, run.settings(batches[-1], workload.longest), max(DEPTHS)) as measured:
        cells = Cells(run, "lengths", shape, _bytes_on(run.device, shape), measured)
        found, size, blocks = measured.subject.settings, measured.subject.block_size, measured.subject.num_blocks - 1
        for prompts in (
            *((length,) * rows for length in workload.lengths for rows in batches),
            *(ragged(*workload.ragged, rows) for rows in batches[1:]),
        ):
            batch, lacks = Batch(prompts), ""
            if (needed := batch.blocks(workload, size)) > blocks:
                lacks = f"it needs {needed:,} KV blocks of {size} tokens; memory holds {blocks:,}"
            cells.add(batch, partial(_after_its_prompts, batch=batch, repeats=run.repeats), lacks=lacks, way="engine")
    return Found(found, cells.found, failures=measured.failures)


def _after_its_prompts(bench: Bench, batch: Batch, repeats: int) -> Steps:
    fill_cache(bench, batch.prompts)
    return through_the_engine(bench, batch, repeats)


def ragged(shortest: int, longest: int, rows: int) -> tuple[int, ...]:
    """Prompts of evenly spaced lengths, in an order that is none, the same in every run."""
    lengths = np.linspace(shortest, longest, rows).round().astype(int)
    return tuple(np.random.default_rng(0).permutation(lengths).tolist())


def _models(shapes: Sequence[Shape], run: Run, table: Table = "models", forms: Forms = _PLAIN) -> Found:
    """Bare graphs and the engine, greedy, beside the floor of what they read: of experts those that were named, of a
    row's state there and back. forms: settings by what they add to a shape's name, each for another engine."""
    found: list[Cell] = []
    failures: list[str] = []
    settings: Settings = {}
    for shape, (form, asked) in product(shapes, forms.items()):
        prompt, most = shape.workload.prompt, shape.batches[-1]
        settings = run.settings(most, shape.workload.context) | asked
        with measured_engine(shape, settings, shape.workload.chained, (prompt,) * most) as measured:
            kv_dtype = FP8_KV if "kv_dtype" in asked else None
            quantize = str(asked.get("quantize", "none"))
            bytes_ = step_bytes(shape.described(), _dtype_on(run.device, shape), quantize, kv_dtype)
            named_shape = replace(shape, name=f"{shape.name} {form}".strip())
            cells = Cells(run, table, named_shape, bytes_, measured)
            settings, nodes = measured.subject.settings, _nodes(measured.subject, shape.batches)
            for rows in shape.batches:
                batch, count = Batch((prompt,) * rows), nodes[rows, form_of("greedy")]
                named, lacks = measured.measure(partial(experts_named, batch=batch))
                for way, measure in (("graph", bare_graphs), ("engine", through_the_engine)):
                    timed = partial(measure, batch=batch, repeats=run.repeats)
                    cells.add(batch, timed, lacks=lacks, experts=named, way=way, nodes=count)
        found += cells.found
        failures += measured.failures
    return Found(settings, found, failures=failures)


def _kernels(shape: Shape, run: Run) -> Found:
    """Every kernel of a launch. Raises BenchmarkError without a GPU."""
    if run.device == "cpu":
        raise BenchmarkError("the CPU runs no kernels that could be traced: this part needs a GPU")
    on_the_gpu(lambda: None)  # tracing is set up before a graph is captured, or it may not see into graphs
    prompt, most = shape.workload.prompt, min(shape.batches[-1], MOST_ROWS)
    settings, bytes_ = run.settings(most, shape.workload.context), _bytes_on(run.device, shape)
    with measured_engine(shape, settings, LAUNCHES + max(DEPTHS)) as measured:
        settings = measured.subject.settings
        traces = []
        for batch in (Batch((prompt,) * rows) for rows in (shape.batches[0], most)):
            named, _ = measured.measure(partial(experts_named, batch=batch))
            traces.append(measured.measure(partial(traced, batch=batch, bytes_=bytes_, experts=named or 0.0)))
    return Found(settings, breakdowns=[found for found, _ in traces if found], failures=measured.failures)


def _quantised(forms: Forms, shape: Shape, run: Run) -> Found:
    """With weights quantized at load."""
    return _models((shape,), run, "step", forms)


def _models_of(shape: Shape, run: Run) -> Found:
    return _models((shape,), run)


_FP8: Final[Forms] = {**_PLAIN, "fp8": {"quantize": "fp8"}}
_INT4_AND_KV: Final[Forms] = {
    "int4": {"quantize": "int4"}, "fp8, fp8 kv": {"quantize": "fp8", "kv_dtype": "fp8"},
}  # fmt: skip
_KINDS: Final = (
    ("engine", "bare graphs, and through the engine", _step, {"0.6B": 3, "1B": 3, "8B": 6, "tiny": 1}),
    ("lengths", "long contexts and ragged lengths", _lengths, {"0.6B": 6, "1B": 4, "8B": 6, "tiny": 1}),
    (
        "prompts",
        "first tokens, alone and beside rows that decode",
        first_token_part,
        {"0.6B": 3, "8B": 6, "30B-A3B": 6, "7B-A1B": 6, "tiny": 1},
    ),
    ("kernels", "every kernel of a launch", _kernels, {"0.6B": 2, "8B": 3, "30B-A3B": 3, "7B-A1B": 4, "tiny": 1}),
    ("models", _MODELS, _models_of, {"30B-A3B": 2, "7B-A1B": 2}),
    ("quantised", "decode steps in 16 bits and in FP8", partial(_quantised, _FP8), {"8B": 4, "30B-A3B": 4, "tiny": 1}),
    (
        "quantised-more",
        "decode steps in INT4, and in FP8 with FP8 keys and values",
        partial(_quantised, _INT4_AND_KV),
        {"8B": 4, "tiny": 1},
    ),
    ("hybrids", _MODELS, _models_of, {"8B-hybrid": 2, "9B-hybrid": 2, "40B-A3B-delta": 2}),
)  # fmt: skip
_OF_512_ROWS: Final = replace(SHAPES["8B"], batches=(512,))
_TINY_MODELS: Final = SHAPES["tiny-experts"], SHAPES["tiny-hybrid"], SHAPES["tiny-halves"]
_DIVIDED: Final = {"8B": (2, 4, 8), "70B": (2, 4, 8), "30B-A3B": (2, 4)}  # numbers of GPUs
PARTS: Final = {
    part.name: part
    for part in (
        *(
            Part(f"{kind}-{shape}", f"{shape}: {what}", about, partial(measure, SHAPES[shape]), "tiny" not in shape)
            for kind, what, measure, minutes in _KINDS
            for shape, about in minutes.items()
        ),
        Part("rows-8B", f"8B with 512 rows: {_MODELS}", 3, partial(_models_of, _OF_512_ROWS), False),
        Part("models-tiny", f"tiny ones: {_MODELS}", 1, partial(_models, _TINY_MODELS), False),
        *(
            Part(
                f"tp{ranks}-{shape}",
                f"{shape}: decode steps and first tokens on {ranks} GPUs, then on one",
                4,
                partial(rank_part, SHAPES[shape], ranks),
                False,
            )
            for shape, counts in _DIVIDED.items()
            for ranks in counts
        ),
    )
}
