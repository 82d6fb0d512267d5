"""What masks leave of rows' logits, beside a look at each row alone."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.kernels.reference.masked_rows import FEW, left_by_masks
from runahead.runtime.row_record import mask_words, token_mask

ROWS = 24
COUNTS = (0, 1, 2, FEW - 1, FEW, FEW + 1, 300, 10_000)


@pytest.mark.parametrize("vocab_size", [500, 4096, 4103])
@pytest.mark.parametrize("seed", range(3))
def test_each_row_keeps_what_its_own_mask_leaves_it(seed: int, vocab_size: int) -> None:
    """Few tokens by themselves, many as a whole row; words beyond the vocabulary mean nothing."""
    dice = np.random.default_rng(seed)
    rows = np.sort(dice.permutation(40)[:ROWS])
    raw = dice.normal(size=(40, vocab_size)).astype(np.float32).round(1)  # with equals among them
    ids = [np.sort(dice.permutation(vocab_size)[: COUNTS[i % len(COUNTS)]]) for i in range(ROWS)]
    words = np.stack([token_mask(one, vocab_size) for one in ids])
    if vocab_size % 32:
        words[:, -1] |= np.int32(-1) << np.int32(vocab_size % 32)
    whole = np.arange(ROWS) % 5 == 1
    left = left_by_masks(raw, words, rows, whole)
    assert sorted([*left.none, *left.few, *left.many]) == rows.tolist()
    seen = set()
    for row, mine, is_whole in zip(rows.tolist(), ids, whole.tolist(), strict=True):
        if not mine.size:
            assert row in left.none
            seen.add("none")
        elif mine.size <= FEW and not is_whole:
            own = left.row == row
            assert left.token[own].tolist() == mine.tolist()
            assert left.distance[own].tolist() == (raw[row, mine] - raw[row, mine].max()).tolist()
            assert left.likeliest[left.few == row].tolist() == [mine[raw[row, mine].argmax()]]
            assert left.count[left.few == row].tolist() == [mine.size]
            seen.add("few")
        else:
            expected = np.full(vocab_size, -np.inf, np.float32)
            expected[mine] = raw[row, mine]
            assert np.array_equal(left.logits[left.many == row], [expected])
            seen.add("many and few" if mine.size <= FEW else "many")
    assert len(seen) == 4


def test_where_no_mask_leaves_anything_nothing_is_left() -> None:
    left = left_by_masks(
        np.zeros((2, 70), np.float32), np.zeros((2, mask_words(70)), np.int32), np.arange(2), np.zeros(2, np.bool_)
    )
    assert left.none.tolist() == [0, 1]
    assert not left.few.size and not left.token.size and not left.likeliest.size and left.logits.shape == (0, 70)
