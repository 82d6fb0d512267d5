"""A logit of a prompt that is not finite, while every hidden state is: its request ends so, and nobody else does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from runahead.cuda_graphs.rings import allocate_rings
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from tests.gpu import gpu_chain, launch_scenarios
from tests.gpu.overflowing_head import hidden_states, overflowing
from tests.runtime.launches import Launches, over_program

pytestmark = pytest.mark.usefixtures("without_gradients")

CONFIG = gpu_chain.small_config()
LOUD = 150  # the token whose logit overflows
BAD, ASKING, DECODING, AGAIN = 1, 2, 3, 4
CHUNK = gpu_chain.PREFILL_CHUNK
ASKED = SamplingParams(temperature=0.0, prompt_logprobs=2)
FIVE = StoppingParams(max_tokens=5, ignore_eos=True)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, LOUD, length).tolist()


PROMPT = prompt_of(80, seed=1)  # three chunks, the last of 16 tokens
OTHERS = {ASKING: prompt_of(70, seed=2), DECODING: prompt_of(5, seed=3)}


@dataclass(frozen=True, slots=True)
class Served:
    """What requests were sent, by handle."""

    tokens: dict[int, list[int]]
    reasons: dict[int, int]
    prompts: dict[int, list[tuple[int, bytes, bytes, bytes]]]
    cached: dict[int, int]


def serve(depth: int, sign: int, place: int, *, bad: SamplingParams | None = ASKED, again: bool = False) -> Served:
    """Serve the neighbours, and beside them the prompt whose logits overflow at `place`, unless `bad` is None.

    again: when everything has ended, another request begins with its first chunk.
    """
    weights = overflowing(CONFIG, gpu_chain.random_weights(CONFIG), PROMPT[: place + 1], LOUD, sign)
    under_test = gpu_chain.cpu_engine(CONFIG, weights, depth)
    try:
        under_test.submit(DECODING, OTHERS[DECODING], SamplingParams(temperature=0.8, seed=5, logprobs=1), FIVE)
        under_test.submit(ASKING, OTHERS[ASKING], ASKED, FIVE)
        if bad is not None:
            under_test.submit(BAD, PROMPT, bad, FIVE)
        under_test.run()
        if again:
            under_test.submit(AGAIN, [*PROMPT[:CHUNK], LOUD], SamplingParams(temperature=0.0), FIVE)
            under_test.run()
    finally:
        under_test.device.close()
    sent = [message for _, message in under_test.links.sent]
    prompts: dict[int, list[tuple[int, bytes, bytes, bytes]]] = {}
    for message in sent:
        if isinstance(message, m.PromptLogprobs):
            part = (message.offset, message.chosen, message.top_ids, message.top_logprobs)
            prompts.setdefault(message.handle, []).append(part)
    cached = {message.handle: message.cached_tokens for message in sent if isinstance(message, m.Admitted)}
    return Served(under_test.tokens(), under_test.reasons(), prompts, cached)


@pytest.mark.parametrize("sign", [1, -1], ids=["+inf", "-inf"])
def test_the_model_overflows_at_one_place_only(sign: int) -> None:
    base = gpu_chain.random_weights(CONFIG)
    weights = overflowing(CONFIG, base, PROMPT[:41], LOUD, sign)
    for tokens, broken in ((PROMPT, [40]), (OTHERS[ASKING], []), (OTHERS[DECODING], [])):
        hidden = hidden_states(CONFIG, base, tokens)
        logits = hidden @ weights.lm_head.t()
        assert hidden.isfinite().all()
        assert (~logits.isfinite()).nonzero().tolist() == [[place, LOUD] for place in broken]
        assert all(logits[place, LOUD] == sign * float("inf") for place in broken)


@pytest.mark.parametrize("sign", [1, -1], ids=["+inf", "-inf"])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, len(PROMPT) - 2], ids=["0", "31", "32", "last"])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_prompt_logit_that_is_not_finite_ends_its_request_alone(depth: int, place: int, sign: int) -> None:
    served, without = serve(depth, sign, place, again=True), serve(depth, sign, place, bad=None)
    assert served.reasons[BAD] == FinishReason.NON_FINITE
    assert BAD not in served.tokens, "a token of it was sent"
    chunks_before = place // CHUNK
    assert [part[0] for part in served.prompts.get(BAD, [])] == [1 + CHUNK * i for i in range(chunks_before)]
    assert served.reasons[AGAIN] == FinishReason.LENGTH
    assert served.cached[AGAIN] == 0, "blocks that it wrote were found again"
    for handle in OTHERS:
        assert served.reasons[handle] == FinishReason.LENGTH
        assert served.tokens[handle] == without.tokens[handle]
        assert served.prompts.get(handle) == without.prompts.get(handle)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_last_prompt_logit_that_is_not_finite_is_a_generated_one(depth: int) -> None:
    """Its request has no log-probability of it: those before were sent, and it ends without a token."""
    served = serve(depth, 1, len(PROMPT) - 1)
    assert served.reasons[BAD] == FinishReason.NON_FINITE
    assert BAD not in served.tokens
    assert [part[0] for part in served.prompts[BAD]] == [1, 1 + CHUNK, 1 + 2 * CHUNK]
    assert all(served.reasons[handle] == FinishReason.LENGTH for handle in OTHERS)


@pytest.mark.parametrize("depth", [0, 2])
def test_logits_that_nobody_asked_for_are_not_looked_at(depth: int) -> None:
    """Only a prompt's own wish makes logits of it: another request with the same tokens goes on."""
    served = serve(depth, 1, 40, bad=SamplingParams(temperature=0.0))
    assert served.reasons[BAD] == FinishReason.LENGTH
    assert len(served.tokens[BAD]) == 5
    assert BAD not in served.prompts


# ---------------------------------------------------------------- the program alone


class OneLogit(Decoder):
    """A decoder one of whose logits is replaced at one hidden state."""

    at: torch.Tensor
    value: float

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().own_logits(hidden)
        logits[(hidden == self.at).all(dim=1), LOUD] = self.value
        return logits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_the_flag_of_the_launch_names_the_row_whose_prompt_logits_are_not_finite(value: float) -> None:
    weights = gpu_chain.random_weights(CONFIG)
    model = OneLogit(CONFIG, weights, ReferenceKernels())
    model.at, model.value = hidden_states(CONFIG, weights, PROMPT[:41])[-1], value
    rings = allocate_rings(launch_scenarios.LAYOUT)
    program = HostProgram(model, rings, max_rows=5, num_blocks=41, block_size=16, context_length=128)
    launches = Launches(over_program(program), rings, CONFIG.vocab_size, 8)
    for slot, asked in ((0, ASKED), (1, SamplingParams(temperature=0.0)), (3, ASKED)):
        launches.begin(slot, PROMPT if slot < 3 else prompt_of(80, seed=9), asked)
    found = [launches.launch({0: 32, 1: 32, 3: 32}), launches.launch({0: 16, 1: 16, 3: 16})]
    assert found[0].finite == {0: True, 1: True, 3: True}
    assert found[1].finite == {0: False, 1: True, 3: True}, "row 1 has the same logits, and did not ask for them"
