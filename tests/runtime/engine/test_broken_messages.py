"""Whatever a front end says: at worst its connection ends, with its requests, and nobody else notices."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.runtime.engine.hostile_wire import PROMPT, Wire, submit
from tests.runtime.programs.hash_model import VOCAB


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    made.close()


def changed(**changes: object) -> m.Submit:
    return msgspec.structs.replace(submit(1), **changes)


def drawn(**sampling: Any) -> m.Submit:
    return submit(1, SamplingParams(**sampling))


def repeating(prompt_ids: bytes) -> m.Submit:
    return msgspec.structs.replace(drawn(repetition_penalty=1.5), prompt_ids=prompt_ids)


MANY = np.arange(2, 60, dtype=np.int32)

# Each with words of the reason that is told.
BROKEN: dict[str, tuple[m.ToEngine, str]] = {
    "prompt of five bytes": (changed(prompt=b"12345"), "prompt has 5 bytes"),
    "no prompt": (changed(prompt=b"", block_keys=b""), "empty prompt"),
    "prompt id out of range": (changed(prompt=np.array([*PROMPT[1:], VOCAB], np.int32).tobytes()), "prompt has an id"),
    "negative prompt id": (changed(prompt=np.array([*PROMPT[1:], -1], np.int32).tobytes()), "prompt has an id"),
    "handle 0": (changed(handle=0), "`int` >= 1"),
    "handle over 64 bits' half": (changed(handle=1 << 63), "`int` <= 9223372036854775807"),
    "id of 257 characters": (changed(request_id="r" * 257), "length <= 256 - at `$[2]`"),
    "salt of 257 characters": (changed(cache_salt="r" * 257), "length <= 256 - at `$[7]`"),
    "33 stop ids": (submit(1, stop_token_ids=tuple(range(33))), "length <= 32 - at `$[5][2]`"),
    "32 stop ids beside the model's own": (
        submit(1, stop_token_ids=tuple(range(2, 34)), ignore_eos=False),
        "ends with any of 33 ids",
    ),
    "stop id out of range": (submit(1, stop_token_ids=(VOCAB,)), "lists an id"),
    "negative stop id": (submit(1, stop_token_ids=(-1,)), "`int` >= 0 - at `$[5][2]"),
    "grammar for an engine that follows none": (changed(structure="{}"), "this engine follows none"),
    "no tokens": (submit(1, max_tokens=0), "`int` >= 1 - at `$[5][0]`"),
    "negative max_tokens": (submit(1, max_tokens=-1), "`int` >= 1 - at `$[5][0]`"),
    "max_tokens over 32 bits": (submit(1, max_tokens=1 << 40), "`int` <= 2147483647 - at `$[5][0]`"),
    "min_tokens over max_tokens": (submit(1, min_tokens=31), "min_tokens 31 over its 30"),
    "top_k over 32 bits": (drawn(top_k=1 << 40), "`int` <= 2147483647 - at `$[4][1]`"),
    "negative top_k": (drawn(top_k=-1), "`int` >= 0 - at `$[4][1]`"),
    "top_p 0": (drawn(top_p=0.0), "`float` >= 1e-45 - at `$[4][2]`"),
    "top_p that is 0 in float32": (drawn(top_p=1e-50), "`float` >= 1e-45 - at `$[4][2]`"),
    "min_p over 1": (drawn(min_p=1.5), "`float` <= 1.0 - at `$[4][3]`"),
    "negative temperature": (drawn(temperature=-1.0), "`float` >= 0.0 - at `$[4][0]`"),
    "repetition penalty 0": (drawn(repetition_penalty=0.0), "`float` >= 1e-30 - at `$[4][9]`"),
    "top log-probabilities over the maximum": (drawn(logprobs=21), "`int` <= 20 - at `$[4][8]`"),
    "prompt log-probabilities over the maximum": (drawn(prompt_logprobs=21), "`int` <= 20 - at `$[4][12]`"),
    "1,025 biased ids": (drawn(bias_ids=tuple(range(1025))), "length <= 1024 - at `$[4][5]`"),
    "1,025 biases": (drawn(bias_values=(1.0,) * 1025), "length <= 1024 - at `$[4][6]`"),
    "ids without biases": (drawn(bias_ids=(3,)), "1 ids and 0 biases"),
    "one id twice in the biases": (drawn(bias_ids=(3, 3), bias_values=(1.0, 1.0)), "two biases for one id"),
    "bias id out of range": (drawn(bias_ids=(VOCAB,), bias_values=(1.0,)), "lists an id"),
    "negative bias id": (drawn(bias_ids=(-1,), bias_values=(1.0,)), "`int` >= 0 - at `$[4][5]"),
    "mask of another vocabulary": (drawn(allowed_mask=bytes([255] * (VOCAB // 32 * 4))), "does not fit"),
    "mask of no words": (drawn(allowed_mask=b"12345"), "allowed_mask has 5 bytes"),
    "mask beyond the vocabulary": (drawn(allowed_mask=bytes([255] * (-(-VOCAB // 32) * 4))), "does not fit"),
    "mask of nothing": (drawn(allowed_mask=bytes(-(-VOCAB // 32) * 4)), "allows nothing"),
    "keys that are too few": (changed(block_keys=b"k" * 32), "32 bytes of keys for 2 blocks"),
    "no keys": (changed(block_keys=b""), "0 bytes of keys for 2 blocks"),
    "distinct ids for nobody": (changed(prompt_ids=np.array([3], np.int32).tobytes()), "1 distinct ids"),
    "no distinct ids": (repeating(b""), "0 distinct ids"),
    "more distinct ids than tokens": (repeating(MANY.tobytes()), "58 distinct ids for a prompt of 20"),
    "distinct ids that are not": (repeating(np.array([3, 3], np.int32).tobytes()), "not ascending ids"),
    "distinct id out of range": (repeating(np.array([VOCAB], np.int32).tobytes()), "not ascending ids"),
    "negative distinct id": (repeating(np.array([-1, 3], np.int32).tobytes()), "not ascending ids"),
    "Hello twice": (m.Hello(m.PROTOCOL_VERSION), "Hello twice"),
    "Cancel for a reason that is the engine's": (m.Cancel(1, FinishReason.NON_FINITE), "NON_FINITE"),
    "Abort of 1,025 ids": (m.Abort(1, ("r",) * 1025), "length <= 1024 - at `$[2]`"),
    "Abort of an id of 257 characters": (m.Abort(1, ("r", "r" * 257)), "length <= 256 - at `$[2][1]`"),
}
BROKEN |= {
    f"{name} is {value}": (drawn(**{name: value}), f"`float` {bound} - at `$[4][{place}]`")
    for name, place, bounds in (
        ("temperature", 0, (">= 0.0", "<= 1e+30")),
        ("top_p", 2, (">= 1e-45", "<= 1.0")),
        ("min_p", 3, (">= 0.0", "<= 1.0")),
        ("repetition_penalty", 9, (">= 1e-30", "<= 1e+30")),
        ("presence_penalty", 10, (">= -1e+30", "<= 1e+30")),
        ("frequency_penalty", 11, (">= -1e+30", "<= 1e+30")),
    )
    for value, bound in zip((math.nan, math.inf), bounds, strict=True)
}


@pytest.mark.parametrize(("message", "words"), BROKEN.values(), ids=BROKEN)
def test_a_message_that_can_t_be_ends_its_connection_and_nothing_else(
    wire: Wire, message: m.ToEngine, words: str
) -> None:
    wire.turn_until(lambda: wire.hostile.heard)
    wire.hostile.say(submit(1))  # it has a request that goes well, until then
    wire.turn_until(lambda: wire.hostile.tokens)
    if isinstance(message, m.Submit) and message.handle == 1:
        message = msgspec.structs.replace(message, handle=2)
    wire.hostile.say(message)
    wire.check_hostile_is_gone()
    (reason,) = wire.reasons
    assert words in reason
    wire.check_bystander()
    stats = wire.engine.stats()
    assert stats.finished == {"LENGTH": 1, "CANCELLED": 1}, "its other request ended as one that nobody reads"
    assert (stats.running, stats.waiting) == (0, 0)


def test_one_handle_twice_ends_the_connection(wire: Wire) -> None:
    wire.hostile.say(submit(7))
    wire.hostile.say(submit(7))
    wire.check_hostile_is_gone()
    wire.check_bystander()


def test_handles_go_up(wire: Wire) -> None:
    wire.hostile.say(submit(7))
    wire.hostile.say(submit(6))
    wire.check_hostile_is_gone()
    wire.check_bystander()


def test_a_cancel_of_nobody_hurts_nobody(wire: Wire) -> None:
    wire.hostile.say(m.Cancel(1234))
    wire.hostile.say(m.StatsQuery(1))
    wire.turn_until(lambda: any(isinstance(said, m.StatsReply) for said in wire.hostile.heard))
    wire.check_bystander()
    assert not wire.hostile.lost


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x94\x05\x01" + b"\x91" * 100_000, msgspec.msgpack.encode(submit(1)).replace(b"r", b"\xff", 1)],
    ids=["nothing", "no MessagePack", "lists in lists without end", "text that is not UTF-8"],
)
def test_bytes_that_are_no_message_end_the_connection(wire: Wire, body: bytes) -> None:
    wire.hostile.say_body(body)
    wire.check_hostile_is_gone()
    wire.check_bystander()


def test_the_reason_repeats_nothing_of_the_prompt(wire: Wire) -> None:
    wire.hostile.say(changed(prompt=b"secretsecretX", request_id="whose"))
    wire.check_hostile_is_gone()
    assert "secret" not in wire.reasons[0]
    assert "whose" not in wire.reasons[0]
    assert "13 bytes" in wire.reasons[0]


# ---------------------------------------------------------------- anything at all

NUMBERS = st.sampled_from([-1, 0, 1, 2, 20, 33, VOCAB, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)])
FLOATS = st.sampled_from([-1.0, 0.0, 5e-324, 1e-50, 1e-45, 0.5, 1.0, 2.0, 1e38, 1e300, math.nan, math.inf, -math.inf])
VALUES = st.one_of(
    NUMBERS,
    FLOATS,
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.binary(max_size=12),
    st.lists(st.one_of(NUMBERS, FLOATS), max_size=40),
)
CHANGES = st.lists(st.tuples(st.integers(0, 200), VALUES), min_size=1, max_size=3)


# One of each kind. A Submit, which has the most to get wrong, comes as often as all others.
KINDS: tuple[Callable[[], m.ToEngine], ...] = (
    *(lambda: submit(2),) * 4,
    lambda: m.Abort(1, ("r", "s")),
    lambda: m.Cancel(1),
    lambda: m.Hello(m.PROTOCOL_VERSION),
    lambda: m.StatsQuery(1),
)


def fuzzed(make: Callable[[], m.ToEngine], changes: list[tuple[int, object]]) -> bytes:
    """A message in which some fields, of its own or of what it holds, are something else."""
    message = make()
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    if isinstance(message, m.Abort):
        del fields[3:]  # `all_requests` and a longer `reach` would mean the bystander, too
    places = [(fields, i) for i in range(len(fields))]
    places += [(inner, i) for inner in fields if isinstance(inner, list) for i in range(len(inner))]
    for place, value in changes:
        held, i = places[place % len(places)]
        held[i] = value
    return msgspec.msgpack.encode(fields)


FUZZED = st.builds(fuzzed, st.sampled_from(KINDS), CHANGES)


@settings(max_examples=150, deadline=None)
@given(bodies=st.lists(st.one_of(FUZZED, st.binary(max_size=60)), min_size=1, max_size=4))
def test_whatever_is_said_the_engine_goes_on_and_a_bystander_has_its_tokens(bodies: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wire = Wire(Path(folder))
        for body in bodies:
            if wire.hostile.lost:
                break
            wire.hostile.say_body(body)
            for _ in range(3):
                wire.engine.turn()
                wire.bystander.hear()
                wire.hostile.hear()
        wire.check_bystander()
        wire.turn_until(lambda: not wire.engine.ledger.in_flight and not len(wire.engine.registry))
        assert wire.engine.stats().front_ends_lost == wire.hostile.lost == bool(wire.reasons)
        wire.close()
