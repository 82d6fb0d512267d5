"""The reference sampler under masks of grammars."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.reference.sampling import sample_rows
from runahead.runtime.row_record import token_mask
from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of
from tests.runtime.kernels.test_sampling import MAX_TOP, tokens_of


@pytest.mark.parametrize("top_k", [0, 3])
def test_rows_under_masks_alone_get_the_tokens_of_rows_that_are_allowed_as_many(top_k: int) -> None:
    """Those are changed one by one; these together, and where few tokens are left noise is drawn for these alone."""
    vocab, counts = 500, (1, 2, 5, 63, 64, 65, 300, 499)
    random = np.random.default_rng(top_k)
    left = [tuple(sorted(random.permutation(vocab)[: counts[i % len(counts)]].tolist())) for i in range(32)]
    specs = [RowSpec(temperature=(0.0, 0.7, 1.5)[i % 3], seed=i, top_k=top_k, position=7 + i) for i in range(32)]
    logits = torch.randn(32, vocab, generator=torch.Generator().manual_seed(4)) * 3
    expected = tokens_of(logits, [replace(spec, allowed=ids) for spec, ids in zip(specs, left, strict=True)])
    state, slots = state_of(specs, vocab), torch.arange(32)
    masks = {i: token_mask(ids, vocab) for i, ids in enumerate(left)}
    found = sample_rows(logits, state, penalties_of(specs, vocab), slots, Form.FULL, MAX_TOP, masks=masks)
    assert found.tokens.tolist() == expected
    assert found.nothing_left is not None and not bool(found.nothing_left.any())
