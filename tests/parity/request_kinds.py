"""The kinds of requests of the parity matrix: what the request at place `i` of a cell asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from runahead.v1 import GenerateRequest


def _greedy(request: GenerateRequest, i: int) -> None:
    request.sampling.temperature = 0.0


def _seeded(request: GenerateRequest, i: int) -> None:
    request.sampling.temperature = 0.8
    request.sampling.seed = 1000 + i
    if i % 4 == 1:
        request.sampling.top_p = 0.9
        request.sampling.top_k = 50


def _either(request: GenerateRequest, i: int) -> None:
    (_seeded if i % 2 else _greedy)(request, i)


def _penalties(request: GenerateRequest, i: int) -> None:
    _either(request, i)
    request.sampling.repetition_penalty = (1.3, 1.0, 0.9)[i % 3]
    request.sampling.presence_penalty = 0.5
    request.sampling.frequency_penalty = (0.0, 0.4)[i % 2]


def _logprobs(request: GenerateRequest, i: int) -> None:
    _either(request, i)
    request.output.logprobs = (5, 1, 0)[i % 3]


def _prompt_logprobs(request: GenerateRequest, i: int) -> None:
    _either(request, i)
    request.output.prompt_logprobs = (3, 0, 1)[i % 3]
    request.output.echo = i % 2 == 1
    if i % 3 == 1:
        request.output.logprobs = 2


def _stop_strings(request: GenerateRequest, i: int) -> None:
    _either(request, i)
    request.stopping.stop.extend(("raise SystemExit(", "\n\n\n\n\n\n") if i else ("=", "\n", "return"))
    request.stopping.include_stop = i % 2 == 1


KINDS: Final[dict[str, Callable[[GenerateRequest, int], None]]] = {
    "greedy": _greedy,
    "seeded-sampling": _seeded,
    "penalties": _penalties,
    "logprobs": _logprobs,
    "prompt-logprobs": _prompt_logprobs,
    "stop-strings": _stop_strings,
}
