"""The bundled model's tokenizer: byte-level BPE whose pieces follow Python's layout."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"

# Newlines and indentation are pieces of their own, so that a prompt may end after a colon, a newline or the
# indentation and is cut as the training text was. One space or mark joins the word after it. Digits stand alone.
PIECES = r"\n+|\r+|\t+| {2,}|[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def end_token(tokenizer: Tokenizer) -> int:
    """The id of the end token. Raises ValueError for a tokenizer without it."""
    token: int | None = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no token {END_OF_TEXT}; it is not one that this corpus was made for")
    return token


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Exactly `VOCABULARY` entries: the end token (id 0), the 256 bytes, and merges. Lossless on any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
