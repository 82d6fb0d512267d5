"""The rings of an engine hold whatever a request may bring."""

from __future__ import annotations

import numpy as np

from runahead.runtime.plan import Chunk
from runahead.runtime.process.parts import ring_layout
from runahead.runtime.row_record import token_mask
from runahead.runtime.scheduler.new_row import admission_record, penalty_list
from runahead.runtime.scheduler.plan_builder import PlanBuilder
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS, SamplingParams, StoppingParams
from tests.gpu.gpu_chain import small_config

PROMPT, VOCAB = 8000, 5000


def test_the_largest_request_fits_beside_every_other_row_s_chunks() -> None:
    config = EngineConfig(model="any", max_rows=40, prefill_chunk=64, max_prefill_tokens=256, block_size=16)
    context = PROMPT + 100
    layout = ring_layout(config, small_config(vocab_size=VOCAB, max_position_embeddings=context), context)
    builder = PlanBuilder(1, layout.plan_words, layout.bulk_words, config.max_prefill_tokens)
    sampling = SamplingParams(
        bias_ids=tuple(range(MAX_BIAS)), bias_values=(1.0,) * MAX_BIAS, presence_penalty=1.0, repetition_penalty=2.0,
        allowed_mask=token_mask((0,), VOCAB).tobytes(),
    )  # fmt: skip
    stopping = StoppingParams(max_tokens=90, stop_token_ids=tuple(range(MAX_STOP_IDS)))
    tokens = (np.arange(PROMPT) % VOCAB).astype(np.int32)
    counts = penalty_list(np.unique(tokens), tokens[:0])
    record = admission_record(
        39, sampling, stopping, PROMPT, PROMPT + 90, (), blocks=range(1, 500), penalty_slot=0, counts=counts
    )
    for slot in range(39):  # one token each, with the prompt's next behind it
        assert builder.fits(1, 1, 0)
        builder.append_blocks(slot, 0, [slot + 1])
        builder.chunk(Chunk(slot, 0, np.array([3], np.int32), False, target=4))
    assert builder.fits(64, 4, record.size)
    assert layout.prompt_tokens == 40 + 256
