"""An open-loop client: makes requests from a seed, and sends each when it is due, independent of earlier ones."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from runahead.service.commands.client_channel import Metadata
from runahead.v1 import generate_pb2, generation_service_pb2_grpc

_LEAST_FRACTION: Final = 1 / 12  # shortest prompt or answer, relative to the median
_MOST_FRACTION: Final = 5.0  # longest one

_OVER_S: Final = 0.2  # between a run's start and its first request, for connections


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal token counts. spread: sigma of the logarithm; 0: always the median."""

    median: int
    spread: float

    def draw(self, source: random.Random, most: int) -> int:
        """Draw 1 to `most` tokens."""
        drawn = source.lognormvariate(math.log(self.median), self.spread)
        bounded = min(max(drawn, self.median * _LEAST_FRACTION), self.median * _MOST_FRACTION)
        return min(max(1, round(bounded)), most)


@dataclass(frozen=True, slots=True)
class Planned:
    """A request. due_s: after the run's start. prompt: token ids. max_tokens: the answer's length, since ends are
    ignored.
    """

    due_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def planned(
    rate: float, count: int, prompts: Lengths, answers: Lengths, *, vocab: int, context: int, seed: int
) -> list[Planned]:
    """Plan Poisson arrivals. A seed gives the same requests at any rate; the rate only stretches their times.

    rate: requests a second; 0: all are due at once. vocab: bound of prompt ids. context: bound of a prompt and its
    answer together.
    """
    source = random.Random(seed)
    due, found = 0.0, list[Planned]()
    for _ in range(count):
        apart = source.expovariate(1.0)
        due += apart / rate if rate else 0.0
        answer = answers.draw(source, max(1, context // 2))
        length = prompts.draw(source, context - answer)
        found.append(Planned(due, tuple(source.randrange(vocab) for _ in range(length)), answer))
    return found


@dataclass(slots=True)
class Outcome:
    """One request's outcome; times in seconds from when it was due.

    first_token_s: None without a token. gaps_s: between messages with tokens. late_s: delay of the sending. failure:
    status and message, empty if it finished.
    """

    wanted: int
    late_s: float = 0.0
    first_token_s: float | None = None
    end_s: float = 0.0
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def token_s(self) -> float:
        """Return the mean time a token after the first; 0 without a second one."""
        if self.first_token_s is None or self.tokens < 2:
            return 0.0
        return (self.end_s - self.first_token_s) / (self.tokens - 1)


async def run(
    channels: Sequence[grpc.aio.Channel], requests: Sequence[Planned], metadata: Metadata, timeout_s: float | None
) -> tuple[list[Outcome], float]:
    """Send the requests. Returns outcomes in their order, and the seconds from the first due time to the last end."""
    stubs = [generation_service_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    messages = [_message(request) for request in requests]
    begun = time.perf_counter() + _OVER_S
    calls = (
        _call(stubs[index % len(stubs)], messages[index], begun + request.due_s, metadata, timeout_s)
        for index, request in enumerate(requests)
    )
    outcomes = await asyncio.gather(*calls)
    ends = (request.due_s + outcome.end_s for request, outcome in zip(requests, outcomes, strict=True))
    return list(outcomes), max(ends, default=0.0)


def _message(request: Planned) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=request.prompt),
        sampling=generate_pb2.SamplingOptions(temperature=0),
        stopping=generate_pb2.StoppingOptions(max_tokens=request.max_tokens, ignore_eos=True),
    )


async def _call(
    stub: generation_service_pb2_grpc.GenerationServiceStub,
    message: generate_pb2.GenerateRequest,
    due: float,
    metadata: Metadata,
    timeout_s: float | None,
) -> Outcome:
    """Make one call. due: on the clock of `time.perf_counter`."""
    outcome = Outcome(message.stopping.max_tokens)
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    outcome.late_s = max(0.0, time.perf_counter() - due)
    last = due
    try:
        async for response in stub.Generate(message, metadata=metadata, timeout=timeout_s):
            if not response.HasField("delta"):
                continue
            now = time.perf_counter()
            if outcome.first_token_s is None:
                outcome.first_token_s = now - due
            else:
                outcome.gaps_s.append(now - last)
            last = now
            outcome.tokens += len(response.delta.tokens)
    except grpc.aio.AioRpcError as error:
        outcome.failure = f"{error.code().name}: {error.details()}"
    outcome.end_s = time.perf_counter() - due
    return outcome
