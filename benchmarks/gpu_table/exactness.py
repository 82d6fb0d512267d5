"""Whether requests keep their bits on live schedules: the bundled model through gRPC, the same requests one at a time
and all together, at several depths, with the exact kernels and with the fastest.

Which requests meet in a launch is a matter of timing, as it is for anybody who is served.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import grpc

from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.results import Agreement
from benchmarks.gpu_table.settings import Settings, flags
from benchmarks.local_service import local_service
from runahead.v1 import EngineConfiguration, GenerateRequest, GenerationServiceStub, GetModelInfoRequest
from runahead.v1.generate_pb2 import Delta, FinishReason

COMPARED: Final = (0, 1, 2, 4)  # launches ahead
Asked: TypeAlias = Literal["on", "off"]
ASKED: Final[tuple[Asked, ...]] = ("on", "off")
START_S: Final = 400.0  # a service whose kernels are compiled first
_VOCAB: Final = 4000  # ids of the bundled model, without the special ones
_STOP_IDS: Final = 8
_CHUNK: Final = 128
# Small launches, so that prompts are cut, and share theirs with others'.
SIZES: Final[Settings] = {"prefill_chunk": _CHUNK, "max_prefill_tokens": 2 * _CHUNK, "run_ahead_tokens": 4 * _CHUNK}


@dataclass(frozen=True, slots=True)
class Crowd:
    """Requests, and what bounds them: tokens of a prompt and of an answer, and seconds within which all arrive."""

    requests: int = 48
    prompt: tuple[int, int] = (3, 700)
    tokens: tuple[int, int] = (40, 300)
    within_s: float = 0.8

    def wanted(self, salt: str) -> list[Wanted]:
        """The same requests in every run. salt: their prompts are found by none that has another."""
        dice = random.Random(5)
        return [self._wanted(i, dice, salt) for i in range(self.requests)]

    def _wanted(self, i: int, dice: random.Random, salt: str) -> Wanted:
        """Greedy or sampled, two of three with log-probabilities, one of four with tokens that end it, one of eight
        with a prompt whose last chunk has one token."""
        request = GenerateRequest(request_id=f"{salt}-{i}", cache_salt=salt)
        length = dice.randint(*self.prompt)
        if i % 8 == 5:
            length = max(self.prompt[0], length // _CHUNK * _CHUNK + 1)
        request.token_ids.ids.extend(dice.randrange(2, _VOCAB) for _ in range(length))
        request.sampling.temperature = (0.0, 0.8)[i % 2]
        request.sampling.top_p = (1.0, 0.9)[i // 2 % 2]
        request.sampling.seed = i
        if i % 3:
            request.output.logprobs = i % 4
        request.stopping.max_tokens = dice.randint(*self.tokens)
        stops = [dice.randrange(2, _VOCAB) for _ in range(_STOP_IDS)]
        if i % 4 == 3:
            request.stopping.stop_token_ids.extend(stops)
        request.stopping.ignore_eos = i % 4 != 3
        return Wanted(request, dice.uniform(0, self.within_s))


@dataclass(frozen=True, slots=True)
class Wanted:
    """after_s: seconds from the beginning, where it does not come alone."""

    request: GenerateRequest
    after_s: float


@dataclass(slots=True)
class Answer:
    """What a stream said. logprobs: of each token that came with one, the chosen one's and those of the likeliest."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    reason: str = ""

    def take(self, delta: Delta) -> None:
        self.tokens += [token.id for token in delta.tokens]
        self.logprobs += [
            (token.logprob, tuple((top.id, top.logprob) for top in token.top))
            for token in delta.tokens
            if token.HasField("logprob")
        ]


FEW: Final = Crowd(requests=6, prompt=(3, 60), tokens=(10, 30), within_s=0.1)  # for trying the benchmark itself


async def _answer(stub: GenerationServiceStub, wanted: Wanted, after_s: float) -> Answer:
    await asyncio.sleep(after_s)
    answer = Answer()
    async for response in stub.Generate(wanted.request):
        event = response.WhichOneof("event")
        if event == "delta":
            answer.take(response.delta)
        elif event == "finished":
            answer.reason = FinishReason.Name(response.finished.reason).removeprefix("FINISH_REASON_")
    if not answer.tokens or answer.reason not in ("LENGTH", "STOP", "END_OF_SEQUENCE"):
        raise BenchmarkError(f"{wanted.request.request_id} ended with {answer.reason}, {len(answer.tokens)} tokens")
    return answer


async def _answers(url: str, crowd: Crowd, asked: Asked, depth: int) -> tuple[list[Answer], list[Answer]]:
    """To the requests one at a time, and together. Raises BenchmarkError for a service that is not what was asked
    for."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        check_exact(asked, (await stub.GetModelInfo(GetModelInfoRequest())).engine)
        alone = [await _answer(stub, wanted, 0) for wanted in crowd.wanted(f"alone-{asked}-{depth}")]
        together = crowd.wanted(f"together-{asked}-{depth}")
        return alone, await asyncio.gather(*(_answer(stub, wanted, wanted.after_s) for wanted in together))


def check_exact(asked: Asked, engine: EngineConfiguration) -> None:
    """Raises BenchmarkError for a service that is not exact though it was asked to be, or the other way round. On a CPU
    it always is."""
    if engine.device != "cpu" and engine.exactness.exact != (asked == "on"):
        raise BenchmarkError(f"the service was started with exact {asked}, and says: {engine.exactness}")


def agreements(
    asked: Asked, settings: Settings, crowd: Crowd, depths: Sequence[int], why_no_more: Callable[[], str]
) -> Iterator[Agreement]:
    """How many answers differ from those of the first depth alone: at every depth, alone and together.

    settings: of the engine. why_no_more: asked before each depth, why it is not begun; empty if it is. Raises
    BenchmarkError, also where it is not, and ServiceFailed.
    """
    expected: list[Answer] = []
    for depth in depths:
        if reason := why_no_more():
            raise BenchmarkError(reason)
        begun = time.monotonic()
        chosen = flags(settings | {"exact": asked, "run_ahead": depth or "serial", "request_log": False})
        try:
            with local_service(chosen, START_S) as service:
                alone, together = asyncio.run(_answers(service.url, crowd, asked, depth))
        except grpc.RpcError as error:
            raise BenchmarkError(f"a call failed with {depth} launches ahead: {error}") from error
        expected = expected or alone
        for is_alone, answers in ((True, alone), (False, together)):
            found = agreement(expected, answers, asked, depth, is_alone)
            print(_sentence(found, time.monotonic() - begun), file=sys.stderr, flush=True)
            yield found


def agreement(
    expected: Sequence[Answer], found: Sequence[Answer], asked: Asked, depth: int, is_alone: bool
) -> Agreement:
    """expected, found: answers to the same requests, in the same order. Raises BenchmarkError where none of them has a
    token's log-probability."""
    pairs = list(zip(expected, found, strict=True))
    if not any(one.logprobs for one in expected):
        raise BenchmarkError("no answer brought log-probabilities")
    return Agreement(
        exact=asked,
        run_ahead=depth,
        alone=is_alone,
        requests=len(pairs),
        other_tokens=sum((one.tokens, one.reason) != (other.tokens, other.reason) for one, other in pairs),
        with_logprobs=sum(bool(one.logprobs) for one in expected),
        other_logprobs=sum(one.logprobs != other.logprobs for one, other in pairs),
    )


def _sentence(found: Agreement, took_s: float) -> str:
    return (
        f"{took_s:6.1f} s  exact {found.exact}, {found.run_ahead or 'serial'}, "
        f"{'alone' if found.alone else 'together'}: {found.other_tokens} of {found.requests} have other tokens, "
        f"{found.other_logprobs} of {found.with_logprobs} other log-probabilities"
    )
