"""Tokenizers whose texts may be cut: of the kinds that checkpoints have, with tokens of several words' parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.runtime.checkpoint.folder import TOKENIZER

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
EXPRESSIONS = {
    "llama 3": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    "qwen 2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
}
NAMES = (*EXPRESSIONS, "gpt 2", "bundled")

# What is hard to cut: spaces and ends of lines of every kind, contractions, marks that join, and a special token.
BITS = (
    *(
        "a",
        "b",
        "Z",
        "s",
        "the",
        "word",
        "it's",
        "the way a",
        "is s t",
        "'s",
        "'",
        "_",
        "-",
        ".",
        "...",
        "9",
        "123",
        "4567",
    ),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2003", " \n ", "\x0b"),
    *("é", "e\u0301", "\u0301", "漢字", "ж", "🙂", "<|end|>", "<|", "ﬁ", "İ"),
)


def texts() -> Iterator[str]:
    """To learn tokens from."""
    for first in BITS:
        for second in BITS:
            yield f"{first}{second} {first} {second} a the word{first}"


@cache
def cut_tokenizer(name: str) -> Tokenizer:
    """One of `NAMES`, with special tokens before and behind every text where the kind has such."""
    if name == "bundled":
        return Tokenizer.from_file(str(BUNDLED_FOLDER / TOKENIZER))
    tokenizer = Tokenizer(models.BPE())
    if name == "gpt 2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(EXPRESSIONS[name]), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if name == "qwen 2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|begin|>", special=True)])
    if name == "llama 3":
        begin, end = tokenizer.token_to_id("<|begin|>"), tokenizer.token_to_id("<|end|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", begin), ("<|end|>", end)]
        )
    return tokenizer
