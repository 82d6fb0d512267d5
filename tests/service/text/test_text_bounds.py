"""A text that can't fit is refused for its bytes, and no text that can."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from runahead.service.contract.errors import ServiceError
from runahead.service.text.text import token_bytes
from runahead.service.text.tokenizer import check_can_fit, longest_token_bytes
from tests.service.cut_tokenizers import BITS, NAMES, cut_tokenizer
from tests.service.fake_engine import INFO
from tests.service.small_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer


def longest(of: Any) -> int | None:
    return longest_token_bytes(json.loads(of.to_str()), token_bytes(of, frozenset()))


TOKENIZERS = {
    **{name: cut_tokenizer(name) for name in NAMES},
    "byte level": byte_level_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
}
LONGEST = {name: longest(of) for name, of in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(st.lists(st.sampled_from([*BITS, "한", "한", "ᾂ", "ᾂ"]), min_size=1, max_size=40))
def test_no_text_has_more_bytes_than_its_tokens_may_stand_for(name: str, bits: list[str]) -> None:
    of, text = TOKENIZERS[name], "".join(bits)
    most = LONGEST[name]
    assert most is not None
    assert len(text.encode()) <= most * len(of.encode(text, add_special_tokens=False).ids)


def test_the_longest_is_that_of_the_vocabulary_and_of_what_may_be_composed_to_it() -> None:
    assert longest(byte_level_tokenizer()) == len("<|end|>")
    composed = byte_level_tokenizer()
    composed.normalizer = normalizers.NFC()
    assert longest(composed) == 3 * len("<|end|>")


@pytest.mark.parametrize(
    "change",
    [
        lambda of: of.add_tokens([AddedToken("x", lstrip=True)]),
        lambda of: of.add_tokens([AddedToken("x", rstrip=True)]),
        lambda of: setattr(of, "normalizer", normalizers.Strip()),
        lambda of: setattr(of, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])),
        lambda of: setattr(of, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda of: setattr(of, "pre_tokenizer", pre_tokenizers.Split(Regex(" "), "removed")),
        lambda of: setattr(of, "model", models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>")),
    ],
)
def test_where_characters_may_come_to_nothing_there_is_no_bound(change: Any) -> None:
    of = byte_level_tokenizer()
    change(of)
    assert longest(of) is None


def test_a_text_is_refused_only_if_the_longest_tokens_would_not_fit() -> None:
    info = msgspec.structs.replace(INFO, context_length=11)  # and a prompt of 10
    check_can_fit("x" * 70, 7, info)
    check_can_fit("x" * 1_000_000, None, info)
    for text in ("x" * 71, "é" * 36):
        with pytest.raises(ServiceError, match=r"text has 7[12] bytes, which are at least 11 tokens, .* prompt of 10"):
            check_can_fit(text, 7, info)
