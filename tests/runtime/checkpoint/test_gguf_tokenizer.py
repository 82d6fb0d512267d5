"""The tokenizer that a GGUF file describes is the one that the model was trained with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from runahead.runtime.checkpoint.gguf_file import open_gguf
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.text.tokenizer import load_tokenizer
from tests.runtime.checkpoint.gguf_files import MARK, MERGES, SPECIAL, TEMPLATE, TOKENS, llama, write

TEXTS = (
    "the the  in <|im_start|>the<|im_end|>",
    "It's 12 o'clock, 2012 and 1212.5!",
    "in\nthe\r\n\r\n  hut\t <mark>in the<mark>",
    "zürich, naïve: 東京 ½ e\u0301",
    " ",
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def described(folder: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of a file whose metadata have these changes; a key's dots are underlines."""
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_str(open_gguf(write(folder / "tiny.gguf", llama(), changes=keys)).tokenizer())


def by_hand(cut: Any, normalizer: Any = None, *, ignore_merges: bool = False) -> Tokenizer:
    """The same vocabulary, put together with the library: `cut` finds the pieces."""
    vocabulary = {token: place for place, token in enumerate(TOKENS)}
    pairs = [(merge.split()[0], merge.split()[1]) for merge in MERGES]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))
    made.pre_tokenizer = cut
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens([MARK])
    return made


def split(pattern: str) -> Any:
    isolated = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
WAYS: dict[str, Tokenizer] = {
    "gpt-2": by_hand(GPT2),
    "smollm": by_hand(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])),
    "llama-bpe": by_hand(split(LLAMA3), ignore_merges=True),
    "qwen2": by_hand(split(QWEN2), normalizers.NFC()),
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_cut_as_the_named_way_cuts_them(way: str, tmp_path: Path) -> None:
    ours = described(tmp_path, pre=way)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == WAYS[way].encode(text).ids, text
        composed = text.replace("e\u0301", "é") if way == "qwen2" else text
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == composed
    numbers = {name: tuple(tokenizer.encode("2012").ids) for name, tokenizer in WAYS.items()}
    assert numbers["gpt-2"] != numbers["smollm"], "the merge of 1 and 2 counts in one of them"


def test_ids_are_those_of_transformers_on_the_same_file(tmp_path: Path) -> None:
    # It cuts texts of smollm as if it were gpt-2, and has llama-bpe without the rule that a piece may be a token whole.
    path = write(tmp_path / "tiny.gguf", llama(), changes={"tokenizer.ggml.pre": "gpt-2"})
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = Tokenizer.from_str(open_gguf(path).tokenizer())
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([1], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ({"add_eos_token": True}, ([], [2])),
        ({"pre": "llama-bpe", "add_bos_token": None}, ([1], [])),
        ({"add_bos_token": None}, ([], [])),
    ],
)
def test_a_text_has_the_tokens_around_it_that_the_file_asks_for(
    changes: dict[str, Any], around: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    tokenizer = described(tmp_path, **changes)
    bare = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.encode("the").ids == [*around[0], *bare, *around[1]]


def test_special_tokens_are_found_in_a_text_and_a_marked_one_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama())
    tokenizer = load_tokenizer(open_gguf(path))
    assert list(tokenizer.special_tokens.values()) == list(SPECIAL)
    ids = asyncio.run(tokenizer.encode(f"<|im_end|>in{MARK}")).tolist()
    assert ids == [2, TOKENS.index("in"), TOKENS.index(MARK)]
    assert asyncio.run(tokenizer.decode(ids)) == f"in{MARK}"
    assert tokenizer.token_bytes.of(TOKENS.index("Ġthe")) == b" the"
    assert tokenizer.chat_templates == {"default": TEMPLATE, "tool_use": TEMPLATE}
    assert tokenizer.template_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    asyncio.run(tokenizer.close())


def test_a_token_that_is_not_used_is_no_token(tmp_path: Path) -> None:
    kinds = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [5]
    assert described(tmp_path, token_type=kinds).token_to_id(MARK) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model 'llama'; of GGUF files only 'gpt2'.* in the Hugging Face layout"),
        ({"model": None}, r"tokenizer\.ggml\.model None"),
        (
            {"pre": "tekken"},
            r"tokenizer\.ggml\.pre 'tekken'; supported are gpt-2, smollm, .* Hugging Face layout",
        ),
        ({"pre": None}, r"tokenizer\.ggml\.pre None"),
        ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        ({"token_type": [1]}, r"tokens, \d+ of them different, and 1 kinds"),
        ({"tokens": ["a"] * len(TOKENS)}, r"1 of them different"),
        ({"merges": ["abc"]}, r"merge 'abc', which is not a pair"),
        ({"merges": ["Ġ nothing"]}, r"is not readable: .*nothing"),
        ({"add_bos_token": True, "bos_token_id": 9999}, r"bos_token_id 9999, which is not a token"),
    ],
    ids=str,
)
def test_a_vocabulary_that_can_not_be_served_is_refused_by_name_with_a_way_out(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = write(tmp_path / "tiny.gguf", llama(), changes=keys)
    with pytest.raises(ConfigError, match=f"{sentence}.*; --tokenizer none serves it for token ids only"):
        load_tokenizer(open_gguf(path))
