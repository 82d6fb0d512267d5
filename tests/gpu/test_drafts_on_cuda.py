"""Drafts on a GPU, captured graphs and all: no bit changes, at any depth."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from tests.gpu import gpu_chain
from tests.runtime.kernels.drafted_engine import ChangingForms, served

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("without_gradients")]

# No more requests than rows with drafts: few launches have a prompt beside them, so that most verify drafts.
ROWS, NUM_BLOCKS = 4, 65
FORMS: Final = (3,)  # each number of drafts takes seconds to compile
CONFIG = gpu_chain.small_config(
    max_position_embeddings=96, architecture="Qwen3ForCausalLM", windows=(0, 24), intermediate_size=64
)


class Sometimes(ChangingForms):
    """Three drafts in most launches."""

    most = FORMS[0]

    def drafts(self, number: int, rows: int) -> int:
        return 0 if number % 7 == 6 else FORMS[0]


def engine(run_ahead: int, *, drafts: bool) -> gpu_chain.EngineUnderTest:
    return gpu_chain.cuda_engine(
        CONFIG,
        gpu_chain.random_weights(CONFIG, torch.bfloat16),
        run_ahead,
        max_rows=ROWS,
        num_blocks=NUM_BLOCKS,
        drafts=Sometimes() if drafts else None,
        draft_rows=ROWS if drafts else 0,
        draft_forms=FORMS if drafts else (),
    )


def test_drafts_change_no_bit_at_any_depth() -> None:
    """Tokens, reasons and log-probabilities; and at a drain the device's rows are the host's, the drafter's too."""
    expected = served(engine(0, drafts=False), CONFIG, ROWS)
    for run_ahead in (0, 1, 2, 4):
        drafted = engine(run_ahead, drafts=True)
        found = served(drafted, CONFIG, ROWS)
        differing = [handle for handle in expected[0] if found[0].get(handle) != expected[0][handle]]
        assert not differing, f"depth {run_ahead}: {len(differing)} of {ROWS} requests differ: {differing}"
        assert found == expected, f"depth {run_ahead}: reasons or log-probabilities differ"
        stats = drafted.engine.stats()
        print(f"depth {run_ahead}: drafted {stats.drafted}, accepted {stats.accepted}, {stats.fallbacks}")
        assert stats.drafted[1] > 0, "nothing was drafted"
        assert stats.accepted[1] > 0, "no draft was right, as if none had been verified"
        assert stats.fallbacks["drafts"] > 0, "the number of drafts never changed"
