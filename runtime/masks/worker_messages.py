"""What the engine tells its mask worker, and what that answers: frames as on the engine's other sockets.

A frame (`runahead.runtime.wire.frames`) holds MessagePack, one struct of the unions below.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runahead.runtime.masks.masks import NO_STOPS, Stops
from runahead.runtime.wire.frames import framed


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first order. model: the path of the checkpoint whose tokenizer it is. drafts: of a row's run, at most.
    context_length: of the rows, whose tokens are looked up for what may follow; 0: nobody's are."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_rows: int
    drafts: int = 0
    context_length: int = 0


class Open(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """grammar: in llguidance's own form, as JSON."""

    order: int
    grammar: str
    stops: Stops = NO_STOPS


class Place(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """tokens: int32 [position], where a drafter looks at them; else none."""

    order: int
    slot: int
    epoch: int
    position: int
    tokens: bytes = b""


class Take(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """orders: int64 [n]. tokens: int32 [n]. drafts: in the F behind these tokens, at most. guesses: of these, the
    drafter's. soon: a later F may have some, too."""

    orders: bytes
    tokens: bytes
    drafts: int = 0
    guesses: int = 0
    soon: bool = False


class Close(msgspec.Struct, frozen=True, array_like=True, tag=5):
    order: int


Order = Begin | Open | Place | Take | Close


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """No mask can be made for the request any more.

    reason: a `FinishReason`. STRUCTURE_COST: its grammar takes more than its limits, or can't be compiled.
    NOTHING_LEFT: nothing can follow its tokens. STRUCTURE_MISMATCH: its grammar does not take a token that its mask
    allowed.
    """

    order: int
    reason: int


class Says(msgspec.Struct, frozen=True, array_like=True, tag=102):
    """What the worker wants logged. It repeats nothing of a request."""

    what: str


Answer = Lost | Says

_encoder: Final = msgspec.msgpack.Encoder()
_orders: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def frame(message: Order | Answer) -> bytes:
    """Length and body, ready to send."""
    return framed(_encoder.encode(message))


def read_order(body: bytes) -> Order:
    """Raises msgspec.MsgspecError."""
    return _orders.decode(body)


def read_answer(body: bytes) -> Answer:
    """Raises msgspec.MsgspecError."""
    return _answers.decode(body)
