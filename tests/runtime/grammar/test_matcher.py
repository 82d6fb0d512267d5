"""Grammars over a model's tokens: those that are none, those that cost too much, and what is said of them."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.grammar.extra import is_installed
from runahead.runtime.grammar.matcher import GrammarError, VocabularyError, load_vocabulary, new_matcher

EOS = 0
VOCAB = 4096


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), VOCAB, (EOS,))


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def test_a_matcher_takes_what_its_grammar_allows_and_ends_with_an_end_of_sequence(vocabulary: LLTokenizer) -> None:
    matcher = new_matcher(vocabulary, lark('start: "yes" | "no"'))
    assert matcher.validate_tokens(vocabulary.tokenize_str("maybe")) == 0
    assert not matcher.is_accepting()
    assert matcher.consume_tokens(vocabulary.tokenize_str("yes"))
    assert matcher.is_accepting()
    assert matcher.consume_token(EOS)
    assert matcher.is_stopped() and not matcher.is_error()


def test_any_end_of_sequence_of_the_model_ends_a_grammar_and_logits_may_be_wider_than_the_tokenizer() -> None:
    wide = load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), VOCAB + 40, (EOS, 1))
    assert wide.vocab_size == VOCAB + 40
    for end in (EOS, 1):
        matcher = new_matcher(wide, lark('start: "a"'))
        assert matcher.consume_tokens([*wide.tokenize_str("a"), end])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("{", "EOF"),
        (lark("start: nowhere"), "nowhere"),
        (lark('start: "a'), "lexer error"),
        (lark("start: /(/"), "unclosed group"),
        (lark("start: A\nA: " + " & ".join(f"/.*{chr(97 + n)}.{{{10 + n}}}/" for n in range(12))), "fuel exhausted"),
    ],
)
def test_what_is_no_grammar_or_costs_too_much_is_refused(vocabulary: LLTokenizer, grammar: str, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        new_matcher(vocabulary, grammar)


def test_neither_a_refused_grammar_nor_a_token_that_does_not_fit_is_written_anywhere(
    vocabulary: LLTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GrammarError):
        new_matcher(vocabulary, lark('start: SECRET "secret'))
    matcher: LLMatcher = new_matcher(vocabulary, lark('start: "allowed"'))
    assert not matcher.consume_tokens(vocabulary.tokenize_str("secret"))
    assert "secret" not in matcher.get_error()
    assert capfd.readouterr() == ("", "")


def test_a_model_without_an_end_and_a_tokenizer_that_is_none_are_refused() -> None:
    with pytest.raises(VocabularyError, match="no end-of-sequence token"):
        load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), VOCAB, ())
    with pytest.raises(VocabularyError, match="no end-of-sequence token"):
        load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), VOCAB, (VOCAB,))
    with pytest.raises(VocabularyError, match="of a kind that grammars are not followed in"):
        load_vocabulary("{}", VOCAB, (EOS,))


def test_an_end_that_no_launch_can_draw_is_left_out() -> None:
    vocabulary = load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), VOCAB, (EOS, 99_999))
    assert vocabulary.eos_token == EOS


def test_the_extra_is_there_if_the_interpreter_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed()
    monkeypatch.setattr("runahead.runtime.grammar.extra.find_spec", lambda name: None)
    assert not is_installed()
