"""Completions whose tokens are known: what is asked for, and what an idle service answers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.load.calls import Call, completed
from benchmarks.serving import prompts
from runahead.v1 import GenerateRequest, GenerationServiceStub, SamplingOptions, StoppingOptions

COUNT = 24
LEAST_TOKENS, MOST_TOKENS = 16, 64


class CalmRunFailed(RuntimeError):
    """An idle service did not answer as it should, so that nothing can be compared with what it says."""


def cases(count: int = COUNT) -> list[GenerateRequest]:
    """Make requests of several lengths, half of them greedy, half drawn with a separate seed."""
    found = []
    for number, prompt in enumerate(prompts(count)):
        sampling = SamplingOptions(temperature=0.0 if number % 2 else 0.8, seed=number)
        max_tokens = LEAST_TOKENS + number * (MOST_TOKENS - LEAST_TOKENS) // max(1, count - 1)
        stopping = StoppingOptions(max_tokens=max_tokens, ignore_eos=True)
        text = "".join(f"# {line}\n" for line in range(number)) + prompt
        found.append(GenerateRequest(text=text, sampling=sampling, stopping=stopping))
    return found


def asked(case: GenerateRequest, salt: str) -> GenerateRequest:
    """Repeat a request under a new salt: it finds nothing of its prompt in the prefix cache, and has the same
    tokens."""
    request = GenerateRequest()
    request.CopyFrom(case)
    if salt:
        request.cache_salt = salt
    return request


async def calm_answers(
    stub: GenerationServiceStub, wanted: Sequence[GenerateRequest], metadata: Sequence[tuple[str, str]] = ()
) -> list[tuple[int, ...]]:
    """The tokens of each, one asked for after the other. Raises CalmRunFailed."""
    answers = []
    for case in wanted:
        call: Call = await completed(stub, asked(case, ""), metadata=metadata)
        if call.fault or not call.is_finished:
            raise CalmRunFailed(f"an idle service answers {call.code.name} ({call.reason}): {call.fault or call.what}")
        answers.append(call.tokens)
    return answers
