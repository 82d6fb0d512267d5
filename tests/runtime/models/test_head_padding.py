"""Draft heads whose tensors have rows beyond the model's vocabulary: padding is left out, other tokens are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.checkpoint.safetensors_header import read_header
from runahead.runtime.models.drafters.head_files import FirstRows, is_padded, without_padding
from tests.runtime.models import eagle3_heads, eagle_heads
from tests.runtime.models.eagle3_heads import KNOWN, NARROW, WHOLE, write_head3
from tests.runtime.models.eagle_heads import HIDDEN, VOCAB, write_head
from tests.runtime.models.test_eagle import as_it_is, opened

PADDED = 192  # the next multiple of 64
NAN = float("nan")


def padded(tensor: torch.Tensor, rows: int = PADDED) -> torch.Tensor:
    """With rows that nobody may read."""
    return torch.cat([tensor, torch.full((rows - len(tensor), *tensor.shape[1:]), NAN)])


@pytest.mark.parametrize(
    ("rows", "tokens", "is_so"),
    [
        (160, 160, True), (192, 160, True), (256, 160, True), (512, 160, True), (161, 160, False), (159, 160, False),
        (128, 160, False), (224, 160, False), (320, 160, False), (1024, 160, False),
        (151680, 151665, True), (151936, 151665, False), (152064, 151665, True), (152064, 151936, True),
        (32064, 32000, False), (32256, 32000, True), (128256, 128256, True),
    ],
)  # fmt: skip
def test_padding_ends_at_a_round_number(rows: int, tokens: int, is_so: bool) -> None:
    assert is_padded(rows, tokens) == is_so


def test_padding_of_a_copied_embedding_is_passed_over(tmp_path: Path) -> None:
    tensors = eagle_heads.random_head()
    copied = {**tensors, "embed_tokens.weight": padded(torch.zeros(VOCAB, HIDDEN))}
    head = opened(write_head(tmp_path, copied, vocab_size=PADDED))
    assert head.weights(as_it_is).parameters == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("rows", [192, 256, 512])
def test_a_padded_head_is_the_one_without_padding(rows: int, tmp_path: Path) -> None:
    tensors = eagle3_heads.random_head(width=NARROW, known=VOCAB)
    names = ("embed_tokens.weight", "lm_head.weight")
    more = {**tensors, **{name: padded(tensors[name], rows) for name in names}}
    keys = {**WHOLE, "hidden_size": NARROW}
    plain = opened(write_head3(tmp_path / "plain", tensors, **keys)).weights(as_it_is)
    head = opened(write_head3(tmp_path / "more", more, **{**keys, "vocab_size": rows, "draft_vocab_size": rows}))
    weights = head.weights(as_it_is)
    assert plain.embedding is not None and weights.embedding is not None
    assert plain.lm_head is not None and weights.lm_head is not None
    assert torch.equal(weights.embedding, plain.embedding) and torch.equal(weights.lm_head, plain.lm_head)
    assert (weights.parameters, weights.targets) == (plain.parameters, None)


def test_rows_beyond_a_draft_vocabulary_are_left_out(tmp_path: Path) -> None:
    """Of a head whose d2t has an entry for each of its tokens and whose t2d has one for each padded token."""
    tensors = eagle3_heads.random_head()
    in_draft = torch.cat([tensors["t2d"], torch.zeros(PADDED - VOCAB, dtype=torch.bool)])
    more = {**tensors, "lm_head.weight": padded(tensors["lm_head.weight"], 128), "t2d": in_draft}
    weights = opened(write_head3(tmp_path, more, vocab_size=PADDED)).weights(as_it_is)
    assert weights.lm_head is not None and torch.equal(weights.lm_head, tensors["lm_head.weight"])
    assert weights.targets is not None and len(weights.targets) == KNOWN


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path) -> None:
    whole = torch.randn(9000, 2).bfloat16()
    save_file({"whole": whole}, tmp_path / "model.safetensors")
    stored = read_header(tmp_path / "model.safetensors")["whole"]
    first = FirstRows(stored, 8193)
    pieces = list(first.pieces())
    assert [(rows.start, rows.stop) for rows, _ in pieces] == [(0, 4096), (4096, 8192), (8192, 8193)]
    assert torch.equal(torch.cat([torch.from_numpy(numbers) for _, numbers in pieces]), whole[:8193].float())
    assert first.shape == (8193, 2)
    assert without_padding(stored, 8193) is stored, "9000 is not what 8193 is filled up to"


TOKENIZER = {"model": {"vocab": {f"word {number}": number for number in range(VOCAB)}}, "added_tokens": []}


@pytest.mark.parametrize(
    ("added", "sentence"),
    [
        ([], None),
        ([{"id": VOCAB, "content": "<call>"}], f"its tokenizer knows token {VOCAB}, and the model has {VOCAB} tokens"),
    ],
)
def test_a_head_with_a_token_more_is_no_padded_one(
    added: list[dict[str, Any]], sentence: str | None, tmp_path: Path
) -> None:
    folder = write_head(tmp_path, eagle_heads.random_head(), vocab_size=PADDED)
    (folder / "tokenizer.json").write_text(json.dumps({**TOKENIZER, "added_tokens": added}), encoding="utf-8")
    if sentence is None:
        opened(folder)
        return
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


def test_a_draft_vocabulary_with_a_token_more_is_refused(tmp_path: Path) -> None:
    tensors = eagle3_heads.random_head()
    in_draft = torch.cat([tensors["t2d"], torch.zeros(PADDED - VOCAB, dtype=torch.bool)])
    in_draft[VOCAB + 5] = True
    folder = write_head3(tmp_path, {**tensors, "t2d": in_draft}, vocab_size=PADDED)
    with pytest.raises(CheckpointError, match=f"tensor t2d has token {VOCAB + 5} in the draft vocabulary, and the"):
        opened(folder)


@pytest.mark.parametrize("vocab_size", [161, 224, 1024, 128])
def test_another_number_of_tokens_is_another_vocabulary(vocab_size: int, tmp_path: Path) -> None:
    folder = write_head(tmp_path, eagle_heads.random_head(), vocab_size=vocab_size)
    with pytest.raises(CheckpointError, match=f"a vocabulary of {vocab_size} tokens, and the model one of 160"):
        opened(folder)
