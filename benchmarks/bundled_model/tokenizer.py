"""The bundled model's tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def end_token(tokenizer: Tokenizer) -> int:
    """The id of the end token. Raises ValueError for a tokenizer without it."""
    token: int | None = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no token {END_OF_TEXT}; it is not one that this corpus was made for")
    return token
