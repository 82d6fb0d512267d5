"""Whatever a front end may ask for of a row, it gets a token that is its own, and so does the row beside it."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runahead.cuda_graphs.device import Form
from runahead.runtime.engine.submit_check import check_message
from runahead.runtime.kernels.reference.sampling import sample_rows
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import ProtocolError
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from runahead.service.contract.limits import LIMITS
from tests.runtime.kernels.extreme_rows import VOCAB
from tests.runtime.kernels.sampling_oracle import RowSpec, expect, penalties_of, state_of

INFO = m.EngineInfo("m", "a", VOCAB, 64, (1,), -1, 4, 8, 9, 16, 2, "cpu", "float32", 5, penalty_slots=2)
PROMPT = (3, 4, 4, 5)
NEIGHBOUR = RowSpec(temperature=1.0, seed=7, position=9)

_TINY = (5e-324, 1e-50, 7e-46, 8e-46, 1e-45, 1e-38, 1e-30)
_values = st.one_of(
    st.sampled_from((*_TINY, 0.0, 0.5, 1.0, 1e30, *(-value for value in _TINY), -1e30)),
    st.floats(0.0, 1.0),
    st.floats(-1e30, 1e30),
)
_sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": _values,
        "top_k": st.sampled_from((0, 1, 5, VOCAB, (1 << 31) - 1)),
        "top_p": _values,
        "min_p": _values,
        "seed": st.integers(0, 2**63 - 1),
        "repetition_penalty": _values,
        "presence_penalty": _values,
        "frequency_penalty": _values,
    },
)


def accepted(sampling: SamplingParams) -> SamplingParams | None:
    """What arrives of it, where the engine takes it."""
    prompt = np.array(PROMPT, np.int32)
    submit = prepared_submit(1, "r", prompt, sampling, StoppingParams(4), block_size=0)
    try:
        arrived = m.decode_to_engine(m.encode_frame(submit)[4:])
        check_message(arrived, INFO, 0)
    except ProtocolError:
        return None
    assert isinstance(arrived, m.Submit)
    return arrived.sampling


@settings(deadline=None, max_examples=150)
@given(asked=_sampling, seed=st.integers(0, 1 << 30))
def test_every_message_that_is_taken_has_a_token_of_its_own_and_so_has_its_neighbour(
    asked: dict[str, float], seed: int
) -> None:
    sampling = accepted(msgspec.structs.replace(SamplingParams(temperature=1.0), **asked))
    assume(sampling is not None)
    assert sampling is not None
    spec = RowSpec(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=9,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        prompt=PROMPT,
        said=(6, 6),
    )
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [expect(logits[0].numpy(), spec), expect(logits[1].numpy(), NEIGHBOUR)]
    finite, tokens = sampled(logits, [spec, NEIGHBOUR])
    assert finite == [expected[0].finite, True]
    assert tokens[1] == expected[1].token
    assert [tokens[0]] == sampled(logits[:1], [spec])[1], "as alone"
    if expected[0].finite and spec.temperature <= LIMITS.temperature_max:  # above, float32 rounds scores to one value
        assert tokens[0] in expected[0].kept


def sampled(logits: torch.Tensor, rows: list[RowSpec]) -> tuple[list[bool], list[int]]:
    slots = torch.arange(len(rows))
    found = sample_rows(logits, state_of(rows, VOCAB), penalties_of(rows, VOCAB), slots, Form.FULL, 0)
    return found.finite.tolist(), found.tokens.tolist()
