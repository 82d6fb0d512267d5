"""Which launches of an engine would be one graph on a GPU, and why the others would be none: by their shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from runahead.cuda_graphs.buckets import Buckets
from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.runtime import models
from runahead.runtime.engine.loop import Engine
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu.gpu_chain import EngineUnderTest
from tests.runtime.chain import MemoryLinks

BUNDLED = Path(models.__path__[0]) / "bundled"
ROWS, TOKENS = 4, 256
GREEDY = SamplingParams(temperature=0.0)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.3)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=2)


def prompt(seed: int, tokens: int) -> list[int]:
    return [(37 * seed + 11 * place) % 4000 + 1 for place in range(tokens)]


class Made:
    """An engine on the CPU, and the shapes of its launches since they were last looked at."""

    def __init__(self) -> None:
        config = EngineConfig(
            model=str(BUNDLED), max_rows=ROWS, context_length=1024, device="cpu", threads=1, num_blocks=300,
            prefill_chunk=128, max_prefill_tokens=TOKENS,
        )  # fmt: skip
        parts = assemble(config, lambda done, total: None)
        launch, self.shapes = parts.device.launch, list[LaunchShape]()

        def noted(shape: LaunchShape) -> None:
            self.shapes.append(shape)
            launch(shape)

        parts.device.launch = noted  # type: ignore[method-assign]
        links = MemoryLinks()
        engine = Engine(parts.device, parts.scheduler, links, max_queue=100, run_ahead_asked=2)
        self.under_test = EngineUnderTest(engine, parts.device, None, links)
        self.handle = 0

    def shapes_of(self, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[LaunchShape]:
        """Requests that come together, each of ten tokens."""
        self.shapes.clear()
        for tokens, sampling in asked:
            self.under_test.submit(self.handle, tokens, sampling, StoppingParams(max_tokens=10, ignore_eos=True))
            self.handle += 1
        self.under_test.run()
        return list(self.shapes)

    def count(self, name: str) -> int:
        return self.under_test.engine.scheduler.tally.counters[name]


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def reasons(shapes: Sequence[LaunchShape]) -> dict[str, int]:
    buckets = Buckets.up_to(ROWS, ROWS + TOKENS)
    return dict(Counter(buckets.why_none(shape) for shape in shapes if buckets.launch_key(shape) is None))


def mixed(shapes: Sequence[LaunchShape]) -> list[LaunchShape]:
    return [shape for shape in shapes if not shape.is_decode and not shape.is_closing]


def test_penalties_and_their_counts_ride_in_graphs_with_prompts(made: Made) -> None:
    shapes = made.shapes_of([(prompt(1, 300), PENALISED), (prompt(2, 40), GREEDY), (prompt(3, 500), PENALISED)])
    assert len(mixed(shapes)) >= 4
    assert any(shape.form is Form.FULL for shape in mixed(shapes)), "a chunk beside a row with penalties"
    assert set(reasons(shapes)) <= {"closing"}


def test_prefix_hits_ride_in_graphs_with_prompts(made: Made) -> None:
    tokens = prompt(4, 400)
    made.shapes_of([(tokens, GREEDY)])
    before = made.count("cached_tokens")
    shapes = made.shapes_of([([*tokens, 7, 8, 9], PENALISED), (tokens[:200], GREEDY), (prompt(5, 90), GREEDY)])
    assert made.count("cached_tokens") - before >= 400 // 16 * 16 + 192 - 16
    assert mixed(shapes) and set(reasons(shapes)) <= {"closing"}


def test_chunks_that_leave_log_probabilities_are_counted_and_no_launch_beside_them(made: Made) -> None:
    shapes = made.shapes_of([(prompt(6, 300), SCORED), (prompt(7, 60), GREEDY)])
    scored = [shape for shape in shapes if shape.prompt_logprobs]
    assert 2 <= len(scored) <= 3, "the chunks of one prompt"
    assert reasons(shapes) == {"prompt_logprobs": len(scored), "closing": 1}
    assert [shape for shape in shapes if shape.is_decode and not shape.prompt_logprobs], "what comes after is graphs"
