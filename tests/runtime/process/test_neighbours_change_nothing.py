"""A request's tokens and log-probabilities are the same to the bit alone and among others: at every
depth, in whatever row slot, beside whatever prompts, while others stop.

On a GPU in bfloat16, on the CPU in float32. Requests arrive by how
many tokens the others have, so that every depth and every order makes other launches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pytest

from runahead.cuda_graphs.buckets import MOST_MIXED_TOKENS
from runahead.runtime import models
from runahead.runtime.engine.loop import Engine
from runahead.runtime.plan import Chunk
from runahead.runtime.process import parts
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.plan_builder import PlanBuilder
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import DeviceName, EngineConfig, KvDtype
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.assembled import assembled
from tests.runtime.chain import MemoryLinks, tell_of_marks_one_by_one

pytestmark = pytest.mark.timeout(600)

BUNDLED: Final = Path(models.__path__[0]) / "bundled"
REQUESTS: Final[dict[DeviceName, int]] = {"cpu": 16, "cuda": 48}
ROWS: Final = 12
LONGEST = 300  # tokens of a prompt: several chunks of it
CHUNK = 64
ONE_LEFT = (1, CHUNK + 1, 2 * CHUNK + 1)  # prompts whose last chunk has one token
VOCAB = 4096
COMMON: Final = (8, 9, 12, 14, 59, 199, 258, 259, 266, 269, 272, 283, 290, 300, 307)  # brackets, ends of lines, spaces
Quantize = Literal["none", "fp8", "int4"]


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    sampling: SamplingParams
    stopping: StoppingParams


def requests(count: int) -> list[Asked]:
    """Greedy and sampled ones; half of them with log-probabilities, a third ended by common tokens."""
    dice = random.Random(11)
    found = []
    for i in range(count):
        length = ONE_LEFT[i] if i < len(ONE_LEFT) else dice.randint(3, LONGEST)
        prompt = [dice.randrange(2, VOCAB) for _ in range(length)]
        sampling = SamplingParams(
            temperature=(0.0, 0.8, 1.1)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            logprobs=(2, -1, 0, -1)[i % 4],
        )
        stops = COMMON if i % 3 == 1 else ()
        found.append(Asked(prompt, sampling, StoppingParams(dice.randint(10, 40), min_tokens=5, stop_token_ids=stops)))
    return found


@dataclass(slots=True)
class Answer:
    """slot: the row slot that it had."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    reason: int = 0
    slot: int = -1

    @property
    def said(self) -> tuple[object, ...]:
        """What the client sees."""
        return self.tokens, self.logprobs, self.reason


def served(
    device: DeviceName,
    run_ahead: int,
    order: Sequence[int],
    each: int,
    kv_dtype: KvDtype,
    quantize: Quantize,
    chunk: int = CHUNK,
    together: int = 1,
) -> tuple[list[Answer], EngineStats]:
    """As `answered`, of the bundled model."""
    config = EngineConfig(
        model=str(BUNDLED), device=device, dtype="bfloat16" if device == "cuda" else "float32",
        run_ahead=run_ahead, max_rows=ROWS, context_length=512, prefill_chunk=chunk,
        max_prefill_tokens=2 * chunk,
        threads=1 if device == "cpu" else 0, kv_dtype=kv_dtype, quantize=quantize,
    )  # fmt: skip
    return answered(config, requests(len(order)), order, each, together)


def answered(
    config: EngineConfig, asked: Sequence[Asked], order: Sequence[int], each: int, together: int = 1
) -> tuple[list[Answer], EngineStats]:
    """The answers to all that is asked, by place, and the engine's figures. order: in which requests arrive; each after
    `each` tokens more of those before it, or when these have ended; at most `together` in one turn of the loop."""
    assembly = assembled(config)
    assert assembly.info.exactness.exact
    tell_of_marks_one_by_one(assembly.device)
    links = MemoryLinks()
    engine = Engine(assembly.device, assembly.scheduler, links, max_queue=len(asked), run_ahead_asked=config.run_ahead)
    answers, taken = [Answer() for _ in asked], 0
    waiting = list(order)
    while waiting or links.unread or len(engine.registry) or engine.ledger.in_flight:
        tokens = sum(len(answer.tokens) for answer in answers)
        for _ in range(together):
            if not waiting or (tokens < each * (len(order) - len(waiting)) and len(engine.registry)):
                break
            place = waiting.pop(0)
            one = asked[place]
            links.tell(1, prepared_submit(place + 1, f"r{place}", np.array(one.prompt, np.int32), one.sampling,
                                          one.stopping, block_size=config.block_size))  # fmt: skip
        engine.turn()
        for request in engine.scheduler.holdings.requests():
            answers[request.handle - 1].slot = request.row_slot
        for _, message in links.sent[taken:]:
            take(message, answers)
        taken = len(links.sent)
    stats = engine.stats()
    assembly.device.close()
    return answers, stats


def take(message: m.ToFrontEnd, answers: list[Answer]) -> None:
    """What came for whom."""
    assert not isinstance(message, m.Refused), message
    if not isinstance(message, m.Output):
        return
    handles = np.frombuffer(message.handles, np.int64).tolist()
    for handle, token in zip(handles, np.frombuffer(message.tokens, np.int32).tolist(), strict=True):
        answers[handle - 1].tokens.append(token)
    for one in message.logprobs:
        answers[handles[one.index] - 1].logprobs.append((one.chosen, one.top_ids, one.top_logprobs))
    for end in message.finished:
        answers[end.handle - 1].reason = end.reason


@pytest.mark.parametrize(
    ("device", "kv_dtype", "quantize"),
    [
        ("cpu", "auto", "none"),
        ("cpu", "fp8", "none"),
        pytest.param("cpu", "auto", "fp8", marks=pytest.mark.large),
        pytest.param("cpu", "auto", "int4", marks=pytest.mark.large),
        pytest.param("cuda", "auto", "none", marks=pytest.mark.gpu),
        pytest.param("cuda", "fp8", "none", marks=pytest.mark.gpu),
        pytest.param("cuda", "auto", "fp8", marks=pytest.mark.gpu),
        pytest.param("cuda", "auto", "int4", marks=pytest.mark.gpu),
    ],
)
def test_a_request_has_the_tokens_and_log_probabilities_that_it_has_alone(
    device: DeviceName, kv_dtype: KvDtype, quantize: Quantize
) -> None:
    count = REQUESTS[device]
    alone, quiet = served(device, 2, range(count), 1 << 30, kv_dtype, quantize)
    assert quiet.launches_by_kind["mixed"] >= count
    assert min(len(answer.tokens) for answer in alone) > 0
    assert {FinishReason.STOP, FinishReason.LENGTH} <= {FinishReason(answer.reason) for answer in alone}
    asked = requests(count)
    assert all(bool(one.logprobs) == (ask.sampling.logprobs >= 0) for one, ask in zip(alone, asked, strict=True))
    backwards = range(count)[::-1]
    for run_ahead, order, each in (
        (0, range(count), 5),
        (1, backwards, 7),
        (2, range(count), 0),
        (4, backwards, 3),
    ):
        crowded, stats = served(device, run_ahead, order, each, kv_dtype, quantize)
        assert stats.launches < quiet.launches / 3, "they did not run together"
        assert stats.events["admitted"].idle < count / 2, "no prompt was computed beside rows that decode"
        assert stats.ledger_depth_max == max(1, run_ahead)
        assert len({answer.slot for answer in crowded}) > ROWS / 2
        differing = [place for place in range(count) if crowded[place].said != alone[place].said]
        assert differing == [], f"launches ahead: {run_ahead}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pieces_of_a_chunk_change_nothing(device: DeviceName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are cut where prompts wait beside rows that decode; by default on a GPU alone."""
    ends: list[tuple[int, bool]] = []  # of each planned chunk, and whether it is the prompt's last
    plan_chunk = PlanBuilder.chunk

    def noted(self: PlanBuilder, chunk: Chunk) -> None:
        ends.append((chunk.start + chunk.tokens.size, chunk.samples))
        plan_chunk(self, chunk)

    monkeypatch.setattr(PlanBuilder, "chunk", noted)
    monkeypatch.setattr(
        parts,
        "SchedulerLimits",
        lambda **limits: SchedulerLimits(**{**limits, "mixed_graph_tokens": MOST_MIXED_TOKENS}),
    )
    whole = MOST_MIXED_TOKENS  # a chunk's size, of which no prompt has more
    count = 16
    alone, _ = served(device, 2, range(count), 1 << 30, "auto", "none", whole)
    assert all(is_last for _, is_last in ends)
    for run_ahead in (0, 2, 4):
        ends.clear()
        crowded, _ = served(device, run_ahead, range(count), 0, "auto", "none", whole, together=count)
        pieces = [end for end, is_last in ends if not is_last]
        assert pieces and all(end % CHUNK == 0 for end in pieces)
        assert [one.said for one in crowded] == [one.said for one in alone], f"launches ahead: {run_ahead}"
