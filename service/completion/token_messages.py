"""Makes the contract's Token messages."""

from __future__ import annotations

from collections.abc import Sequence

from runahead.service.text.token_bytes import TokenBytes
from runahead.v1 import Token, TopToken


def token_message(table: TokenBytes, token_id: int) -> Token:
    """Make a token without log-probabilities."""
    return Token(id=token_id, bytes=table.of(token_id))


def scored_token(
    table: TokenBytes, token_id: int, logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float]
) -> Token:
    """Make a token with its log-probability and the top tokens at its position, most likely first."""
    top = [
        TopToken(id=top_id, bytes=table.of(top_id), logprob=value)
        for top_id, value in zip(top_ids, top_logprobs, strict=True)
    ]
    return Token(id=token_id, bytes=table.of(token_id), logprob=logprob, top=top)
