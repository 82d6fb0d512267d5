"""What each request must be answered, from the definition of the models alone, with Python integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.late_masks import MadeUpMatcher
from tests.runtime.programs.hash_model import EOS, VOCAB
from tests.simulation.draws import drawn
from tests.simulation.script import STATES, Ask, World

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
STATE_INIT = 0x243F6A8885A308D3  # of a row that has seen no token


@dataclass(frozen=True, slots=True)
class Entry:
    """How likely a token was, and the most likely ones in its place."""

    chosen: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """entries: of the tokens, if they were asked for. refusal: the field at fault if the request can never be served.
    sick_from: prompt entries from there on mean nothing, and the request ends without them."""

    tokens: tuple[int, ...] = ()
    entries: tuple[Entry, ...] = ()
    reason: FinishReason = FinishReason.NOT_FINISHED
    prompt_entries: tuple[Entry, ...] = ()
    sick_from: int = 1 << 30
    refusal: str = ""


class _Running:
    """Digests of a growing list of tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.count = 0
        self._total = 0
        self._state = STATE_INIT
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        self.count += 1
        mixed = ((token + 1) * ((self.count * _GOLDEN & _MASK) | 1)) & _MASK
        self._total ^= mixed ^ (mixed >> 29)
        self._state = next_state(self._state, token)

    @property
    def hash(self) -> int:
        return self._total ^ (self._total >> 32)

    @property
    def state(self) -> int:
        return state_digest(self._state)


def next_state(state: int, token: int) -> int:
    """A recurrent state after one more token."""
    return ((state ^ (token + 1)) * (_GOLDEN | 1) + 1) & _MASK


def state_digest(state: int) -> int:
    return state ^ (state >> 31)


def answer(ask: Ask, world: World) -> Answer:
    """Everything that a request is told if nobody interrupts it."""
    refusal = _refusal(ask, world)
    if refusal:
        return Answer(refusal=refusal)
    running = _Running(ask.prompt)
    stops = {*(() if ask.ignore_eos else (EOS,)), *ask.stop_token_ids}
    max_len = min(len(ask.prompt) + ask.max_tokens, world.context_length)
    said: Counter[int] = Counter()
    tokens: list[int] = []
    entries: list[Entry] = []
    reason = FinishReason.NOT_FINISHED
    followed = MadeUpMatcher(ask.grammar) if ask.grammar else None
    while reason is FinishReason.NOT_FINISHED:
        position = running.count
        if position == ask.sick_logits or 0 <= ask.sick_hidden < position:
            reason = FinishReason.NON_FINITE
            break
        digest = running.hash ^ (running.state if world.mode in STATES else 0)
        is_early = len(tokens) < ask.min_tokens
        allowed = _allowed(ask, followed, is_early)
        if not allowed:
            reason = FinishReason.NOTHING_LEFT
            break
        token = drawn(ask, digest, position, said, stops if is_early else (), allowed)
        tokens.append(token)
        if followed is not None:
            followed.consume_token(token)
        if ask.logprobs >= 0:
            entries.append(_entry(digest, token, ask.logprobs))
        said[token] += 1
        running.add(token)
        reason = _reason(ask, token, stops, len(tokens), position + 1 >= max_len, world)
    sick_from = ask.sick_hidden if ask.sick_hidden >= 0 else 1 << 30
    return Answer(tuple(tokens), tuple(entries), reason, _prompt_entries(ask), sick_from)


def _allowed(ask: Ask, followed: MadeUpMatcher | None, is_early: bool) -> list[int]:
    """Ids that may come next, ascending. followed: the request's grammar, as far as its tokens have come."""
    allowed = set(ask.allowed or range(VOCAB))
    if followed is not None:
        allowed &= set(followed.allowed())
        if is_early:  # of stops the end of a grammar alone
            allowed -= set(ask.stop_token_ids) - {EOS}
    return sorted(allowed)


def _refusal(ask: Ask, world: World) -> str:
    """Without time: what no moment could serve."""
    if ask.sampling.has_penalty and not world.penalty_slots:
        return "sampling"
    count, total = len(ask.prompt), world.num_blocks - 1
    if not 0 < count < world.context_length:
        return "prompt"
    longest = min(count + ask.max_tokens, world.context_length)
    if -(-(longest - 1) // world.block_size) > total:
        return "prompt" if count > total * world.block_size else "stopping.max_tokens"
    return ""


def _reason(ask: Ask, token: int, stops: set[int], count: int, is_last: bool, world: World) -> FinishReason:
    if token in stops and (count > ask.min_tokens or ask.grammar):
        is_eos = token == EOS and not ask.ignore_eos
        return FinishReason.END_OF_SEQUENCE if is_eos else FinishReason.STOP
    if not is_last:
        return FinishReason.NOT_FINISHED
    limited = len(ask.prompt) + ask.max_tokens > world.context_length
    return FinishReason.CONTEXT_LENGTH if limited else FinishReason.LENGTH


def _prompt_entries(ask: Ask) -> tuple[Entry, ...]:
    if ask.prompt_logprobs < 0:
        return ()
    entries, running = [], _Running(())
    for token, target in zip(ask.prompt, ask.prompt[1:], strict=False):
        running.add(token)
        entries.append(_entry(running.hash, target, ask.prompt_logprobs))
    return tuple(entries)


def _entry(digest: int, token: int, count: int) -> Entry:
    """digest: of all tokens before this one."""
    ranks = range(count)
    return Entry(
        ((digest ^ (token * _GOLDEN & _MASK)) % 4096) / -256,
        tuple((digest + rank & _MASK) % VOCAB for rank in ranks),
        tuple(float(-(digest % 16 + rank)) for rank in ranks),
    )
