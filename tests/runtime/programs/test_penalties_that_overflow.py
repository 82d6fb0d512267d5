"""A penalty that takes a finite logit of a real model out of float32: its request ends so, and the engine goes on."""

from __future__ import annotations

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from tests.gpu import gpu_chain
from tests.gpu.overflowing_head import large
from tests.runtime.programs.test_prompt_logits_not_finite import prompt_of

pytestmark = pytest.mark.usefixtures("without_gradients")

CONFIG = gpu_chain.small_config()
LOUD = 150
PROMPT = [*prompt_of(40, seed=4), LOUD]  # with a repetition penalty, the token whose logit is large counts as said
NEIGHBOURS = {
    2: (prompt_of(33, seed=5), SamplingParams(temperature=0.8, seed=3, logprobs=2)),
    3: (prompt_of(9, seed=6), SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=1.0)),
}
EIGHT = StoppingParams(max_tokens=8, ignore_eos=True)


def serve(depth: int, penalised: SamplingParams | None) -> tuple[dict[int, list[int]], dict[int, int], list[int]]:
    """Tokens and reasons by handle, and the cached tokens of a second request for the prompt."""
    weights = large(CONFIG, gpu_chain.random_weights(CONFIG), PROMPT, LOUD)
    under_test = gpu_chain.cpu_engine(CONFIG, weights, depth)
    try:
        for handle, (prompt, sampling) in NEIGHBOURS.items():
            under_test.submit(handle, prompt, sampling, EIGHT)
        if penalised is not None:
            under_test.submit(1, PROMPT, penalised, EIGHT)
        under_test.run()
        under_test.submit(4, PROMPT, SamplingParams(temperature=0.0), EIGHT)
        under_test.run()
    finally:
        under_test.device.close()
    admitted = [message for _, message in under_test.links.sent if isinstance(message, m.Admitted)]
    cached = [message.cached_tokens for message in admitted if message.handle == 4]
    return under_test.tokens(), under_test.reasons(), cached


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_penalty_that_leaves_float32_ends_its_request_and_no_other(depth: int, temperature: float) -> None:
    penalised = SamplingParams(temperature=temperature, repetition_penalty=0.01)
    tokens, reasons, cached = serve(depth, penalised)
    alone, _, _ = serve(depth, None)
    assert reasons[1] == FinishReason.NON_FINITE
    assert 1 not in tokens
    assert cached == [0], "what a failed request wrote was found again"
    for handle in (*NEIGHBOURS, 4):
        assert reasons[handle] == FinishReason.LENGTH
        assert tokens[handle] == alone[handle]


def test_without_the_penalty_the_same_logits_are_served() -> None:
    tokens, reasons, cached = serve(2, SamplingParams(temperature=0.0))
    assert reasons[1] == FinishReason.LENGTH
    assert tokens[1][0] == LOUD
    assert cached == [32]
