"""NVTX ranges for the stages of the loop, for a profiler that shows them beside the device's.

    nsys profile runahead serve --device cuda --nvtx

Ranges wrap the engine's methods only if they are asked for; otherwise they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from runahead.runtime.engine.loop import Engine

STAGES: Final = ("plan", "stage", "launch", "commit", "publish")

P = ParamSpec("P")
R = TypeVar("R")


def name_stages(engine: Engine, push: Callable[[str], object], pop: Callable[[], object]) -> None:
    """Put a range around each stage of the engine's work. Call once, before the first turn.

    push, pop: begin a range with a name, and end the newest, such as `torch.cuda.nvtx`'s.
    """
    scheduler = engine.scheduler
    stages = (
        (scheduler, "plan"),
        (engine, "stage"),
        (engine.device, "launch"),
        (scheduler.commits, "commit"),
        (engine.publisher, "publish"),
    )
    for of, name in stages:
        setattr(of, name, _within(name, getattr(of, name), push, pop))


def _within(
    name: str, work: Callable[P, R], push: Callable[[str], object], pop: Callable[[], object]
) -> Callable[P, R]:
    @wraps(work)
    def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
        push(name)
        try:
            return work(*args, **kwargs)
        finally:
            pop()

    return ranged
