"""The text of completions, against the naive way: decode everything, look at the whole."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.text.text import CompletionText, TokenBytes, token_bytes
from tests.service.small_tokenizers import END_ID, byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
BYTES_OF_BYTE_LEVEL = token_bytes(BYTE_LEVEL, {END_ID})
BYTES_OF_SENTENCEPIECE = token_bytes(SENTENCEPIECE, {0, 1, 2})

byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40)
sentencepiece_ids = st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1), max_size=40)
# Few letters, so that stop strings occur, overlap and begin in vain; characters of one to four bytes.
texts = st.text("ab é漢🙂\n", max_size=40)
# Some are the texts of special tokens.
stop_texts = st.text("ab é漢🙂�", min_size=1, max_size=5) | st.sampled_from(["<|end|>", "</s>", "<|", "</"])
stop_strings = st.lists(stop_texts, max_size=4, unique=True).map(tuple)


def naive(table: TokenBytes, ids: list[int], stops: tuple[str, ...], include: bool) -> tuple[str, int, str | None]:
    """Text, kept tokens and the stop that matched, from the whole."""
    pieces = [
        table.of(token_id) if table.of(token_id).decode("utf-8", "replace") in stops else table.text_of(token_id)
        for token_id in ids
    ]
    text = b"".join(pieces).decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                kept = text[: end if include else end - len(stop)]
                starts = [
                    len(codecs.utf_8_decode(b"".join(pieces[:index]), "replace", False)[0]) for index in range(len(ids))
                ]
                return kept, sum(start < len(kept) for start in starts), stop
    return text, len(ids), None


def streamed(table: TokenBytes, ids: list[int], stops: tuple[str, ...], include: bool) -> tuple[str, int, str | None]:
    completion, text, tokens = CompletionText(table, stops, include), "", 0
    for token_id in ids:
        piece = completion.push(token_id)
        text, tokens = text + piece.text, tokens + piece.tokens
        assert tokens == completion.completion_tokens
        if completion.matched is not None:
            return text, tokens, completion.matched
    piece = completion.finish()
    return text + piece.text, tokens + piece.tokens, completion.matched


@given(byte_level_ids, stop_strings, st.booleans())
def test_any_byte_level_tokens_stream_to_what_the_whole_says(
    ids: list[int], stops: tuple[str, ...], include: bool
) -> None:
    assert streamed(BYTES_OF_BYTE_LEVEL, ids, stops, include) == naive(BYTES_OF_BYTE_LEVEL, ids, stops, include)


@given(texts, stop_strings, st.booleans())
def test_any_text_streams_to_what_the_whole_says(text: str, stops: tuple[str, ...], include: bool) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    assert streamed(BYTES_OF_BYTE_LEVEL, ids, stops, include) == naive(BYTES_OF_BYTE_LEVEL, ids, stops, include)


@given(sentencepiece_ids, stop_strings, st.booleans())
def test_any_sentencepiece_tokens_stream_to_what_the_whole_says(
    ids: list[int], stops: tuple[str, ...], include: bool
) -> None:
    assert streamed(BYTES_OF_SENTENCEPIECE, ids, stops, include) == naive(BYTES_OF_SENTENCEPIECE, ids, stops, include)


@given(byte_level_ids)
def test_byte_level_text_is_what_the_tokenizer_decodes(ids: list[int]) -> None:
    assert streamed(BYTES_OF_BYTE_LEVEL, ids, (), False)[0] == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(texts, texts)
def test_sentencepiece_text_continues_a_prompt_as_the_tokenizer_decodes_it(prompt: str, text: str) -> None:
    before, ids = SENTENCEPIECE.encode(prompt).ids, SENTENCEPIECE.encode(text).ids
    if not before:
        before = SENTENCEPIECE.encode("a").ids
    whole = SENTENCEPIECE.decode(before + ids)
    assert whole == SENTENCEPIECE.decode(before) + streamed(BYTES_OF_SENTENCEPIECE, ids, (), False)[0]


@given(texts, stop_strings)
def test_text_is_never_taken_back_and_no_stop_is_ever_seen(text: str, stops: tuple[str, ...]) -> None:
    completion, seen = CompletionText(BYTES_OF_BYTE_LEVEL, stops), ""
    for token_id in BYTE_LEVEL.encode(text).ids:
        seen += completion.push(token_id).text
        assert not any(stop in seen for stop in stops)
        if completion.matched is not None:
            break


def test_without_stop_strings_every_token_is_kept_at_once() -> None:
    completion = CompletionText(BYTES_OF_BYTE_LEVEL)
    pieces = [completion.push(token_id) for token_id in BYTE_LEVEL.encode("🙂").ids]
    assert [piece.tokens for piece in pieces] == [1, 1, 1, 1]
    assert [piece.text for piece in pieces] == ["", "", "", "🙂"]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    completion = CompletionText(BYTES_OF_BYTE_LEVEL)
    first, *_ = BYTE_LEVEL.encode("🙂").ids
    assert completion.push(first).text == ""
    assert completion.finish().text == "�"


def test_a_silent_token_counts_and_comes_last() -> None:
    completion = CompletionText(BYTES_OF_BYTE_LEVEL, ("abc",))
    (ab,) = BYTE_LEVEL.encode("ab").ids
    assert completion.push(ab).tokens == 0
    piece = completion.finish(silent_tokens=1)
    assert (piece.text, piece.tokens, completion.completion_tokens) == ("ab", 2, 2)


def test_the_stop_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    completion = CompletionText(BYTES_OF_BYTE_LEVEL, ("b", "ab", "abab"))
    text = "".join(completion.push(token_id).text for token_id in BYTE_LEVEL.encode("xabab").ids[:2])
    assert (text, completion.matched) == ("x", "ab")


def test_a_long_stream_costs_the_same_for_every_token() -> None:
    """The state does not grow with the text."""
    completion = CompletionText(BYTES_OF_BYTE_LEVEL, ("never",))
    (a,) = BYTE_LEVEL.encode("x").ids
    for _ in range(50_000):
        completion.push(a)
    assert len(completion._held) == 0 and len(completion._starts) == 0


@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_whose_text_is_a_stop_string_ends_the_text_as_that_string(include: bool) -> None:
    (hell,) = BYTE_LEVEL.encode("hell").ids
    ended = streamed(BYTES_OF_BYTE_LEVEL, [hell, END_ID, hell], ("hello", "<|end|>"), include)
    assert ended == (("hell<|end|>", 2, "<|end|>") if include else ("hell", 1, "<|end|>"))
    assert streamed(BYTES_OF_BYTE_LEVEL, [hell, END_ID, hell], ("end",), include) == ("hellhell", 3, None)


def test_special_tokens_have_bytes_and_no_text() -> None:
    assert BYTES_OF_BYTE_LEVEL.of(END_ID) == b"<|end|>"
    assert BYTES_OF_BYTE_LEVEL.text_of(END_ID) == b""
    assert BYTES_OF_BYTE_LEVEL.of(10_000) == b""


def test_the_text_of_an_added_token_is_its_content() -> None:
    """Each character of a byte-level vocabulary stands for a byte, and a character of an added token for itself."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("naïve", "日本", "<think>")])
    tokenizer.add_special_tokens([AddedToken("<fin_é>", special=True)])
    text = "a naïve 日本 é<think>b"
    ids = tokenizer.encode(text).ids
    added = {token_id for token_id in ids if token_id >= BYTE_LEVEL.get_vocab_size()}
    assert len(added) == 3
    table = token_bytes(tokenizer, {END_ID})
    assert streamed(table, ids, (), False)[0] == text == table.text(ids, include_special=False)
    assert streamed(table, ids, ("naïve",), False) == ("a ", 2, "naïve")
    end = tokenizer.token_to_id("<fin_é>")
    assert end is not None and table.of(end) == "<fin_é>".encode()


def test_a_byte_token_of_the_sentencepiece_kind_is_one_byte() -> None:
    for token, spelled in [("<0xE6>", b"\xe6"), ("▁hello", b" hello")]:
        token_id = SENTENCEPIECE.token_to_id(token)
        assert token_id is not None
        assert BYTES_OF_SENTENCEPIECE.of(token_id) == spelled


def test_a_decoder_of_another_kind_is_refused_by_its_name() -> None:
    from tokenizers import decoders

    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        token_bytes(tokenizer, set())
