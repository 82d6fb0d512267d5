"""A text is cut only where that changes no token, and only by tokenizers of which that is certain."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from runahead.service.text import text_cuts, tokenizer
from runahead.service.text.text_cuts import can_be_cut, cut_behind, is_quick
from runahead.service.text.tokenizer import TextTokenizer
from tests.service.cut_tokenizers import BITS, NAMES, cut_tokenizer
from tests.service.small_tokenizers import byte_level_tokenizer, panicking_tokenizer, sentencepiece_tokenizer

PIECE = 12  # characters, so that a text of some words has many


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cuts, "PIECE", PIECE)
    monkeypatch.setattr(tokenizer, "LONG", 2 * PIECE)
    monkeypatch.setattr(tokenizer, "_INLINE_CHARACTERS", 0)


def described(of: Any) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(of.to_str())
    return description


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_the_pieces_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cut_tokenizer(name)
    assert can_be_cut(described(whole))
    cut = TextTokenizer(whole)
    pieces = 0

    async def compare() -> None:
        draws = random.Random(name)
        for _ in range(400):
            text = draws.choice(["", " "]).join(draws.choices(BITS, k=draws.randint(1, 60)))
            special = draws.random() < 0.5
            ids = (await cut.encode(text, special)).tolist()
            assert ids == whole.encode(text, add_special_tokens=special).ids, text

    encode = cut._encode

    def counted(piece: str, special: bool) -> Any:
        nonlocal pieces
        pieces += 1
        return encode(piece, special)

    monkeypatch.setattr(cut, "_encode", counted)
    asyncio.run(compare())
    asyncio.run(cut.close())
    assert pieces > 1000


def test_a_cut_is_between_a_letter_and_the_space_of_the_next_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cuts, "PIECE", 4)
    assert cut_behind("abcd ef", 0, 100) == 4
    assert cut_behind("abcde fg", 0, 100) == 5
    assert cut_behind("ab cd ef gh", 0, 100) == 5
    assert cut_behind("ab cd ef gh", 5, 100) == 11, "what is left is no longer than a piece and a bit"
    assert cut_behind("abcd", 0, 100) == 4
    for text in ("abcd  ef", "abcd. ef", "abcd\nef", "abcd 9ef", "abcdéé ef", "abcd\u00a0ef"):
        assert cut_behind(text, 0, 100) == len(text)
    assert cut_behind("abcde" * 10 + " f", 0, 20) is None
    assert cut_behind("abcde" * 10 + " fghij", 0, 100) == 50


def test_a_tokenizer_of_which_it_is_not_certain_cuts_nothing() -> None:
    assert can_be_cut(described(byte_level_tokenizer()))
    assert not can_be_cut(described(sentencepiece_tokenizer()))
    for change in CHANGES:
        changed = byte_level_tokenizer()
        change(changed)
        assert not can_be_cut(described(changed))


def _split(expression: str, behavior: str = "isolated") -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), behavior), byte_level])


CHANGES = (
    lambda of: of.add_tokens([AddedToken("two words")]),
    lambda of: of.add_tokens([AddedToken("stripped", rstrip=True)]),
    lambda of: setattr(of, "normalizer", normalizers.NFKC()),
    lambda of: setattr(of, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    lambda of: setattr(of, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    lambda of: setattr(of, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    lambda of: setattr(of, "pre_tokenizer", _split(r"\p{L}+ ?|\s+")),
    lambda of: setattr(of, "pre_tokenizer", _split(r"\p{L}+(?= )|\p{L}|\s+")),
    lambda of: setattr(of, "pre_tokenizer", _split(r"[\p{L}| ]+")),
    lambda of: setattr(of, "pre_tokenizer", _split(r"(a|\p{L}+ )|\p{L}+")),
    lambda of: setattr(of, "pre_tokenizer", _split(r"\s+|\p{N}+")),
    lambda of: setattr(of, "pre_tokenizer", _split(r"\p{L}+|\s+", "removed")),
    lambda of: setattr(of.model, "dropout", 0.5),
)


@pytest.mark.parametrize("name", NAMES)
def test_short_texts_of_known_expressions_are_tokenized_at_once(name: str) -> None:
    of = TextTokenizer(cut_tokenizer(name))
    assert of.encodes_at_once("a" * 40)
    asyncio.run(of.close())


def test_short_texts_wait_for_a_thread_where_an_expression_is_not_known() -> None:
    normalizing = byte_level_tokenizer()
    normalizing.normalizer = normalizers.Replace(Regex("(a+)+b"), "a")
    for made, at_once in ((sentencepiece_tokenizer(), True), (panicking_tokenizer(), False), (normalizing, False)):
        of = TextTokenizer(made)
        assert of.encodes_at_once("a" * 40) == at_once
        asyncio.run(of.close())


def test_a_text_without_a_place_for_a_cut_is_one_long_turn() -> None:
    cut = tokenizer._CutText("x" * 40_000 + " y z", lambda piece: np.zeros(len(piece), np.int32))
    assert cut.is_long
    assert not cut.turn()
    assert not cut.is_long
    assert cut.turn()
    assert [len(part) for part in cut.parts] == [40_000, 4]


@pytest.mark.parametrize(
    ("expression", "quick"),
    [
        (r"\p{L}+|\s*[\r\n]+", False),
        (r"\p{L}+|\s*[\r\n]| {2,}|\t+", False),
        (r"\p{L}+|\s*[\r\n]+|\s|\s+", False),
        (r"\p{L}+|\s*[\r\n]+|\s+", True),
        (r"\p{L}+|\s*[\r\n]|\s+(?!\S)|\s", True),
        (r"\p{L}+|\s", True),
    ],
    ids=["nothing else", "single kinds", "one by one", "all", "all but one", "no search"],
)
def test_an_expression_that_looks_through_the_same_spaces_again_is_not_quick(expression: str, quick: bool) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = _split(expression)
    assert is_quick(described(tokenizer)) == quick
    assert can_be_cut(described(tokenizer))
