"""Names for the stages of the loop's work, for a profiler that shows them beside the device's.

    nsys profile runahead serve --device cuda --nvtx

Whoever asks for them has them put around what the engine calls. Nobody else's engine knows of them, or pays for them.
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
    """Puts a range around each stage of the engine's work. To be called once, before its first turn.

    push, pop: begin a range of a name, and end the newest, such as those of `torch.cuda.nvtx`.
    """
    scheduler = engine.scheduler
    places = (
        (scheduler, "plan"),
        (engine, "stage"),
        (engine.device, "launch"),
        (scheduler.commits, "commit"),
        (engine.publisher, "publish"),
    )
    for of, name in places:
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
