"""What a part of the benchmark has found, and the engine that it measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu_table.decode import fill_cache
from benchmarks.gpu_table.engines import Bench, opened
from benchmarks.gpu_table.measured import Measured
from benchmarks.gpu_table.results import Breakdown, Cell, PromptTime
from benchmarks.gpu_table.settings import Settings
from benchmarks.gpu_table.shapes import Shape

DEPTHS: Final = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Found:
    """What a part has measured, and with which settings. failures: why figures are missing."""

    settings: Settings
    cells: Sequence[Cell] = ()
    breakdowns: Sequence[Breakdown] = ()
    prompts: Sequence[PromptTime] = ()
    failures: Sequence[str] = ()


@contextlib.contextmanager
def _filled(shape: Shape, settings: Settings, launches: int, prompts: Sequence[int] = ()) -> Iterator[Bench]:
    with opened(shape, settings, launches) as bench:
        if prompts:
            fill_cache(bench, prompts)
        yield bench


def measured_engine(
    shape: Shape, settings: Settings, launches: int = max(DEPTHS), prompts: Sequence[int] = ()
) -> Measured[Bench]:
    """An engine whose prefix cache holds these prompts. launches: see `opened`."""
    return Measured(lambda: _filled(shape, settings, launches, prompts), lambda bench: bench.is_as_opened)
