"""The hash model, written again from its definition with Python integers: what every chain has to answer."""

from __future__ import annotations

from collections.abc import Collection

VOCAB = 97
EOS = 1
_MASK = (1 << 64) - 1


def hashed(tokens: list[int], seed: int) -> int:
    """The hash model's next token."""
    total = 0
    for i, token in enumerate(tokens, start=1):
        mixed = ((token + 1) * ((i * 0x9E3779B97F4A7C15 & _MASK) | 1)) & _MASK
        total ^= mixed ^ (mixed >> 29)
    return ((total ^ (total >> 32)) ^ seed) % VOCAB


def completion(
    prompt: list[int],
    seed: int,
    max_tokens: int,
    *,
    stops: Collection[int] = (EOS,),
    min_tokens: int = 0,
    context_length: int = 1 << 20,
) -> list[int]:
    """What the model answers. Before `min_tokens` a token that stops is replaced by the next one that does not."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < context_length:
        token = hashed(tokens, seed)
        while len(tokens) < len(prompt) + min_tokens and token in stops:
            token = (token + 1) % VOCAB
        tokens.append(token)
        if token in stops:
            break
    return tokens[len(prompt) :]
