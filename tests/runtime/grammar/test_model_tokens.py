"""Grammars over tokenizers with added tokens: which ids spell a text, and that masks and matchers agree on them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from runahead.runtime.grammar.matcher import load_vocabulary, new_matcher
from runahead.service.text.text import token_bytes
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer, sentencepiece_tokenizer

ADDED = ("<think>", "</think>", "<tool_call>", "naïve")


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


BYTE_LEVEL = with_added_tokens(byte_level_tokenizer())
SENTENCEPIECE = with_added_tokens(sentencepiece_tokenizer())
THINK = BYTE_LEVEL.token_to_id("<think>")


def vocabulary_of(tokenizer: Tokenizer, end: int) -> LLTokenizer:
    return load_vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size() + 3, (end,))


def choice(*texts: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "start: " + " | ".join(map(json.dumps, texts))}]})


def schema(of: dict[str, object]) -> str:
    return json.dumps({"grammars": [{"json_schema": {**of, "x-guidance": {"whitespace_flexible": False}}}]})


def allowed(matcher: LLMatcher) -> list[int]:
    bits: list[int] = np.flatnonzero(
        np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    ).tolist()
    return bits


def completed(vocabulary: LLTokenizer, grammar: str, end: int, seed: int) -> list[int]:
    """Tokens drawn under the masks of a grammar up to its end."""
    matcher, drawn, ids = new_matcher(vocabulary, grammar), random.Random(seed), list[int]()
    while True:
        ids.append(drawn.choice(allowed(matcher)))
        assert matcher.consume_token(ids[-1]), "a mask allows what the matcher does not"
        if ids[-1] == end:
            return ids[:-1]


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(BYTE_LEVEL, END_ID), (SENTENCEPIECE, 2)], ids=["byte-level", "sentencepiece"]
)
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (choice("<think>ab</think>"), "<think>ab</think>"),
        (LLMatcher.grammar_from_regex("<think>a{2}</think>"), "<think>aa</think>"),
        (schema({"const": "<think>"}), '"<think>"'),
        (schema({"enum": ["<tool_call> naïve"]}), '"<tool_call> naïve"'),
        (
            schema({"type": "object", "properties": {"<think>": {"const": 1}}, "required": ["<think>"],
                    "additionalProperties": False}),
            '{"<think>":1}',
        ),
        (choice("<|end|>ab</s>"), "<|end|>ab</s>"),
    ],
    ids=["choice", "regex", "const", "enum", "key", "special"],
)  # fmt: skip
def test_the_texts_of_added_and_of_special_tokens_can_be_said(
    tokenizer: Tokenizer, end: int, grammar: str, text: str
) -> None:
    vocabulary = vocabulary_of(tokenizer, end)
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    table = token_bytes(tokenizer, special)
    for seed in range(3):
        ids = completed(vocabulary, grammar, end, seed)
        assert special.isdisjoint(ids)
        assert table.text(ids, include_special=False) == text


def test_an_added_token_and_the_tokens_of_its_letters_are_both_taken() -> None:
    vocabulary = vocabulary_of(BYTE_LEVEL, END_ID)
    assert THINK is not None
    letters = [BYTE_LEVEL.token_to_id(letter) for letter in "<think>"]
    a = BYTE_LEVEL.token_to_id("a")
    for grammar in (choice("<think>a"), LLMatcher.grammar_from_regex("<think>[ab]{1,3}")):
        assert THINK in allowed(new_matcher(vocabulary, grammar))
        for spelling in ([THINK, a], [*letters, a]):
            assert new_matcher(vocabulary, grammar).consume_tokens(spelling)


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(BYTE_LEVEL, END_ID), (SENTENCEPIECE, 2)], ids=["byte-level", "sentencepiece"]
)
def test_in_free_text_mask_and_matcher_agree_on_every_id(tokenizer: Tokenizer, end: int) -> None:
    vocabulary = vocabulary_of(tokenizer, end)
    matcher = new_matcher(vocabulary, LLMatcher.grammar_from_regex("[^b]{0,19}"))
    inside = allowed(matcher)
    assert set(inside) >= {tokenizer.token_to_id(text) for text in ADDED} | {end}
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special.intersection(inside) == {end}, "a special token is no text"
    taken = [token_id for token_id in range(vocabulary.vocab_size) if matcher.deep_copy().consume_token(token_id)]
    assert taken == inside


@pytest.mark.parametrize(
    ("tokenizer", "special"), [(BYTE_LEVEL, {END_ID}), (SENTENCEPIECE, {0, 1, 2})], ids=["byte-level", "sentencepiece"]
)
def test_a_grammar_sees_the_bytes_that_a_completions_text_has(tokenizer: Tokenizer, special: set[int]) -> None:
    vocabulary = vocabulary_of(tokenizer, max(special))
    table = token_bytes(tokenizer, special)
    marks = {table.spelled.index(b"\xff")}  # the byte by which the library marks special tokens; no text has it
    for token_id in set(range(tokenizer.get_vocab_size())) - special - marks:
        assert vocabulary.decode_bytes([token_id]) == table.text_of(token_id)


def test_an_end_that_is_an_added_token_spells_no_text() -> None:
    """Its text is spelled by other tokens, though the tokenizer reads it as the end."""
    assert THINK is not None
    vocabulary = vocabulary_of(BYTE_LEVEL, THINK)
    ids = completed(vocabulary, choice("<think>a"), THINK, 1)
    assert THINK not in ids and token_bytes(BYTE_LEVEL, set()).text(ids, include_special=False) == "<think>a"


def test_tokens_beyond_the_logits_spell_no_text() -> None:
    assert THINK is not None
    vocabulary = load_vocabulary(BYTE_LEVEL.to_str(), THINK, (END_ID,))
    assert max(completed(vocabulary, choice("<think>a"), END_ID, 1)) < THINK


def test_a_text_that_the_tokenizer_would_change_is_spelled_as_it_is_written() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.enable_truncation(1)
    ids = completed(vocabulary_of(tokenizer, END_ID), choice("Hell he"), END_ID, 1)
    assert tokenizer.decode(ids) == "Hell he"


def test_a_text_that_the_tokenizer_panics_at_is_spelled_nevertheless() -> None:
    tokenizer = byte_level_tokenizer()
    backtracks = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([backtracks, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    text = "a" * 40
    with pytest.raises(BaseException, match="retry-limit"):
        tokenizer.encode(text)
    assert tokenizer.decode(vocabulary_of(tokenizer, END_ID).tokenize_str(text)) == text


def test_no_space_comes_before_a_text_that_goes_on() -> None:
    """A tokenizer that puts a space before a prompt puts none into a grammar's text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    (hell,) = byte_level_tokenizer().encode("hell").ids
    assert vocabulary_of(tokenizer, END_ID).tokenize_str("hell") == [hell]
    metaspace = sentencepiece_tokenizer()
    metaspace.normalizer = None
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    for with_space in (sentencepiece_tokenizer(), metaspace):
        assert vocabulary_of(with_space, 2).tokenize_str("ab") == [with_space.token_to_id(letter) for letter in "ab"]
