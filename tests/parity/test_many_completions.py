"""Several completions of one prompt, through the service: at every depth each is the answer that a request alone with
its seed gets of a service that is serial, and the prompt is computed once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
import pytest

from benchmarks.local_service import local_service
from runahead.v1 import GenerateOnceRequest, GenerateOnceResponse, GenerationServiceStub, StatsRequest
from tests.parity.recurrent_checkpoints import BUNDLED_HYBRID
from tests.parity.services import BLOCK, DEPTHS

pytestmark = pytest.mark.timeout(0)

N: Final = 16  # with --large
FEW: Final = 4  # more than there are rows
ROWS: Final = 3
TIMEOUT_S: Final = 240
PROMPT: Final = (
    "def parse(path):\n    '''Read lines of a file, and keep those that are not empty.'''\n    with open(path) as file:"
    "\n        lines = [line.strip() for line in file]\n    return [line for line in lines if line]\n\n\ndef write("
)
FLAGS: Final = ("--threads", "1", "--block-size", str(BLOCK), "--context-length", "512", "--num-blocks", "400")
HYBRID: Final = ("--model", str(BUNDLED_HYBRID))
CACHELESS: Final = ("--no-prefix-cache",)
DRAFTS: Final = ("--drafter", "ngram", "--draft-tokens", "3")


def _structured(request: GenerateOnceRequest) -> None:
    request.structure.json_object = True


def _penalised(request: GenerateOnceRequest) -> None:
    request.sampling.repetition_penalty, request.sampling.frequency_penalty = 1.3, 0.4


def _of_the_prompt(request: GenerateOnceRequest) -> None:
    request.output.prompt_logprobs, request.output.logprobs = 2, 3


def _greedy(request: GenerateOnceRequest) -> None:
    request.sampling.temperature = 0.0


def _stopped(request: GenerateOnceRequest) -> None:
    request.stopping.stop.extend((")", "\n\n"))


def _plain(request: GenerateOnceRequest) -> None:
    request.sampling.top_p = 0.9


KINDS: Final[tuple[Callable[[GenerateOnceRequest], None], ...]] = (
    _plain, _structured, _penalised, _of_the_prompt, _greedy, _stopped,
)  # fmt: skip


class Served:
    def __init__(self, url: str, stack: contextlib.ExitStack) -> None:
        self._stub = GenerationServiceStub(stack.enter_context(grpc.insecure_channel(url)))

    def ask(self, kind: Callable[[GenerateOnceRequest], None], seed: int, n: int = 1) -> GenerateOnceResponse:
        request = GenerateOnceRequest(text=PROMPT, cache_salt=f"{kind.__name__} {seed} {n}")
        request.sampling.seed, request.stopping.max_tokens = seed, 24
        kind(request)
        if n > 1:
            request.n = n
        answer: GenerateOnceResponse = self._stub.GenerateOnce(request, timeout=TIMEOUT_S)
        return answer

    def computed(self) -> int:
        tokens = self._stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats.tokens
        return int(tokens.prompt - tokens.cached)


def said(one: Any) -> tuple[object, ...]:
    """What must be the same, to the bit."""
    tokens = [(token.id, token.logprob, [(top.id, top.logprob) for top in token.top]) for token in one.tokens]
    stop = one.finished.stop.SerializeToString()
    return one.text, tokens, one.finished.reason, stop, one.finished.seed


@contextlib.contextmanager
def served(*flags: str) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(local_service([*FLAGS, *flags])).url
        yield Served(url, stack)


def alone(count: int, *flags: str) -> dict[str, list[tuple[object, ...]]]:
    """By kind, what each of so many completions must be: of requests one after the other, of a serial service without
    drafts."""
    first = 2**64 - 7
    with served("--run-ahead", "serial", "--max-rows", "1", *flags) as service:
        return {
            kind.__name__: [said(service.ask(kind, (first + index) % 2**64)) for index in range(count)]
            for kind in KINDS
        }


@pytest.fixture(scope="module")
def expected(large: bool) -> Iterator[Callable[..., dict[str, list[tuple[object, ...]]]]]:
    found: dict[tuple[str, ...], dict[str, list[tuple[object, ...]]]] = {}

    def of(*flags: str) -> dict[str, list[tuple[object, ...]]]:
        if flags not in found:
            found[flags] = alone(N if large else FEW, *flags)
        return found[flags]

    yield of


CASES = [
    ((), CACHELESS, "4"),
    ((), DRAFTS, "2"),
    (HYBRID, CACHELESS, "2"),
    *(
        pytest.param(model, more, depth, marks=pytest.mark.large)
        for model in ((), HYBRID)
        for more in ((), CACHELESS, DRAFTS)
        for depth in DEPTHS
    ),
]


@pytest.mark.parametrize(("model", "more", "depth"), CASES)
def test_each_completion_is_that_of_a_request_alone(
    model: tuple[str, ...],
    more: tuple[str, ...],
    depth: str,
    expected: Callable[..., dict[str, list[tuple[object, ...]]]],
    large: bool,
) -> None:
    right, count = expected(*model), N if large else FEW
    with served("--run-ahead", depth, "--max-rows", str(ROWS), "--jitter-seed", "5", *model, *more) as service:
        before = service.computed()
        for kind in KINDS:
            answer = service.ask(kind, 2**64 - 7, count)
            assert [said(one) for one in (answer, *answer.more)] == right[kind.__name__], kind.__name__
            computed, before = service.computed() - before, service.computed()
            assert computed <= answer.accepted.prompt_tokens + count * BLOCK
            ends = [answer.finished, *(one.finished for one in answer.more)]
            assert [end.index for end in ends] == list(range(count))
            usages = [end.usage for end in ends]
            assert {usage.prompt_tokens for usage in usages} == {answer.accepted.prompt_tokens}
            assert sum(usage.prompt_tokens - usage.cached_tokens for usage in usages) == computed
            assert usages[0].cached_tokens == 0
