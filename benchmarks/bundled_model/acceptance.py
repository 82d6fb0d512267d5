"""How many of a drafter's drafts are right where the service completes function heads: a count, not a speed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from benchmarks.local_service import local_service
from runahead.v1 import (
    GenerateOnceRequest,
    GenerateOnceResponse,
    GenerationServiceStub,
    StatsRequest,
)

PLACES = 7  # as many drafts as a launch may look at
TIMEOUT_S = 300.0
LOOK_AGAIN_S = 0.02  # the service publishes its figures a little later than the last token


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted drafts of completions with one number of drafts a launch. texts: by prompt. tokens: of all texts. kept:
    drafts that were right, by position. looked_at: launches that verified the first draft."""

    texts: tuple[str, ...]
    tokens: int
    looked_at: int
    kept: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """The acceptance rate by draft position, given that all earlier drafts were right."""
        reached = (self.looked_at, *self.kept[:-1])
        return tuple(kept / before if before else 0.0 for kept, before in zip(self.kept, reached, strict=True))

    @property
    def tokens_a_launch(self) -> float:
        """Tokens of a row for each launch that verified drafts."""
        return 1 + sum(self.kept) / max(1, self.looked_at)


async def _asked(url: str, heads: Sequence[str], max_tokens: int, temperature: float) -> Acceptance:
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)

        async def one(seed: int, head: str) -> GenerateOnceResponse:
            request = GenerateOnceRequest(text=head)
            request.sampling.temperature, request.sampling.seed = temperature, seed
            request.stopping.max_tokens, request.stopping.ignore_eos = max_tokens, True
            found: GenerateOnceResponse = await stub.GenerateOnce(request, timeout=TIMEOUT_S)
            return found

        answers = await asyncio.gather(*(one(seed, head) for seed, head in enumerate(heads)))
        expected = sum(answer.finished.usage.accepted_tokens for answer in answers)
        while True:
            figures = (await stub.Stats(StatsRequest(), timeout=TIMEOUT_S)).stats.tokens
            kept = tuple(figures.accepted.get(place, 0) for place in range(1, PLACES + 1))
            if sum(kept) == expected:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        said = sum(answer.finished.usage.completion_tokens for answer in answers)
        return Acceptance(tuple(answer.text for answer in answers), said, figures.drafted.get(1, 0), kept)


def acceptance(heads: Sequence[str], max_tokens: int, temperature: float, flags: Sequence[str]) -> Acceptance:
    """All heads at once, head i with seed i, an end token ending nothing, through a service started for it with these
    flags, which name a drafter."""
    with local_service(flags) as service:
        return asyncio.run(_asked(service.url, heads, max_tokens, temperature))
