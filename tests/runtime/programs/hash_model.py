"""The hash model, written again from its definition with Python integers: what every chain has to answer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection

from runahead.runtime.wire.parameters import SamplingParams

VOCAB = 97
EOS = 1
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def hash_of(tokens: list[int]) -> int:
    """64 bits of all tokens and their places."""
    total = 0
    for i, token in enumerate(tokens, start=1):
        mixed = ((token + 1) * ((i * _GOLDEN & _MASK) | 1)) & _MASK
        total ^= mixed ^ (mixed >> 29)
    return total ^ (total >> 32)


def hashed(tokens: list[int], seed: int) -> int:
    """The hash model's next token."""
    return (hash_of(tokens) ^ seed) % VOCAB


def penalty_digest(prompt: list[int], said: list[int], sampling: SamplingParams) -> int:
    """64 bits of what a row with penalties has said, and of its factors; of the prompt if there is a repetition."""
    in_prompt = set(prompt) if sampling.repetition_penalty != 1 else set()
    total = 0
    for token in range(VOCAB):
        seen = 2 * said.count(token) + (token in in_prompt)
        total += seen * ((token + 1) * _GOLDEN & _MASK | 1)
    total &= _MASK
    factors = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    for place, factor in enumerate(factors):
        total ^= struct.unpack("<I", struct.pack("<f", factor))[0] << (8 * place + 1)
    return total ^ (total >> 32)


def penalised_completion(prompt: list[int], sampling: SamplingParams, max_tokens: int) -> list[int]:
    """What the model answers a request with penalties that nothing stops."""

    def following(tokens: list[int]) -> int:
        digest = penalty_digest(prompt, tokens[len(prompt) :], sampling)
        return (hash_of(tokens) ^ sampling.seed ^ digest) % VOCAB

    return _continued(prompt, max_tokens, following)


def _continued(prompt: list[int], count: int, following: Callable[[list[int]], int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


def prompt_logprob(prompt: list[int], place: int) -> float:
    """Of the prompt's token at `place`, 1 or more."""
    target = prompt[place] * _GOLDEN & _MASK
    return ((hash_of(prompt[:place]) ^ target) % 4096) / -256


def prompt_top(prompt: list[int], place: int, count: int) -> list[tuple[int, float]]:
    """The most likely tokens at `place` of the prompt, and their log-probabilities."""
    bits = hash_of(prompt[:place])
    return [((bits + rank & _MASK) % VOCAB, -float(bits % 16 + rank)) for rank in range(count)]


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
