"""A script at every depth: each run against what the models say, and against serial."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from runahead.runtime.wire.parameters import FinishReason
from tests.simulation.life import Broken, Life, Told
from tests.simulation.oracle import Answer, answer
from tests.simulation.script import SERIAL, Script
from tests.simulation.transcript import Heard
from tests.simulation.witness import Witness

_INTERRUPTED = (None, FinishReason.ABORTED)


def check_script(script: Script, num_ranks: int = 1) -> list[Witness]:
    """Run it in serial and at its depths. Raises Broken; returns what each run was witness to. num_ranks: as of
    `make_chain`."""
    answers = [answer(ask, script.world) for ask in script.asks]
    told: dict[int, Told] = {}
    for depth in (SERIAL, *script.world.depths):
        told[depth] = Life(script, depth, num_ranks).live()
        _check(script, depth, partial(_check_answers, script, answers, told[depth]))
        _check(script, depth, partial(_check_same, told[SERIAL].heard, told[depth].heard))
    return [one.witness for one in told.values()]


def _check(script: Script, depth: int, check: partial[None]) -> None:
    try:
        check()
    except AssertionError as error:
        raise Broken(script, depth, "same tokens", error) from error


def _check_answers(script: Script, answers: list[Answer], told: Told) -> None:
    """Every request is told what the model says, or the beginning of it if it was interrupted."""
    for handle, heard in told.heard.items():
        ask, right = script.asks[handle], answers[handle]
        if heard.refusal is not None:
            assert not heard.tokens and heard.reason is None, f"{handle} was refused and answered"
            assert heard.refusal.code != "INVALID_ARGUMENT" or heard.refusal.field == right.refusal, (
                f"{handle} was refused for {heard.refusal.field}: {heard.refusal.message}"
            )
            continue
        assert not (heard.is_accepted and right.refusal), f"{handle} can never be served and was accepted"
        assert heard.cached_tokens % script.world.block_size == 0, f"{handle} found a part of a block"
        assert heard.cached_tokens < len(ask.prompt), f"{handle} found its last prompt token in the cache"
        assert _could_find(script, answers, handle, heard.cached_tokens), f"{handle} found what nobody of its salt left"
        count = len(heard.tokens)
        assert tuple(heard.tokens) == right.tokens[:count], f"{handle} got {heard.tokens}, not {right.tokens}"
        assert heard.entries == list(right.entries[:count]), f"{handle} got other log-probabilities than the model's"
        entries, whole = heard.prompt_entries, len(right.prompt_entries)
        assert entries == list(right.prompt_entries[: len(entries)]), f"{handle} got other prompt log-probabilities"
        assert len(entries) <= min(whole, right.sick_from), f"{handle} got prompt log-probabilities that mean nothing"
        if heard.reason not in _INTERRUPTED:
            assert heard.reason is right.reason, f"{handle} ended with {heard.reason}, not {right.reason}"
            assert count == len(right.tokens), f"{handle} got {count} tokens of {len(right.tokens)}"
            complete = len(entries) == whole or right.sick_from <= whole  # in the chunk of its last token too
            assert complete, f"{handle} lacks prompt log-probabilities"
            stops = heard.reason in (FinishReason.END_OF_SEQUENCE, FinishReason.STOP)
            assert heard.stop_token_id == (right.tokens[-1] if stops else -1), f"{handle} was told another stop id"


def _could_find(script: Script, answers: list[Answer], handle: int, cached_tokens: int) -> bool:
    """Another request of the same salt begins with the tokens that were found, and was to compute them all."""
    prefix, salt = script.asks[handle].prompt[:cached_tokens], script.asks[handle].salt
    others = [(ask, right) for ask, right in zip(script.asks, answers, strict=True) if ask is not script.asks[handle]]
    found = any(ask.salt == salt and (*ask.prompt, *right.tokens)[:cached_tokens] == prefix for ask, right in others)
    return not cached_tokens or found


def _check_same(serial: Mapping[int, Heard], other: Mapping[int, Heard]) -> None:
    """As serial; of an interrupted request one run's tokens are a prefix of the other's."""
    for handle in serial.keys() & other.keys():
        one, two = serial[handle], other[handle]
        tokens, entries = (min(len(one.tokens), len(two.tokens)), min(len(one.prompt_entries), len(two.prompt_entries)))
        assert one.tokens[:tokens] == two.tokens[:tokens], f"{handle} got other tokens than in serial"
        assert one.entries[:tokens] == two.entries[:tokens], f"{handle} got other log-probabilities than in serial"
        assert one.prompt_entries[:entries] == two.prompt_entries[:entries], (
            f"{handle} got other prompt log-probabilities than in serial"
        )
        if one.reason not in _INTERRUPTED and two.reason not in _INTERRUPTED:
            assert one.tokens == two.tokens and one.reason is two.reason, f"{handle} ended elsewhere than in serial"
            assert one.prompt_entries == two.prompt_entries, f"{handle} got other log-probabilities than in serial"
