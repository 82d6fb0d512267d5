"""Messages between the engine and its mask worker, in frames like the engine's other sockets.

A frame (`runahead.runtime.wire.frames`) holds MessagePack, one struct of the unions below.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runahead.runtime.masks.masks import NO_STOPS, Stops
from runahead.runtime.wire.frames import framed


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first order. model: path of the checkpoint with the tokenizer. drafts: most of a row's run. context_length:
    of rows whose tokens a drafter reads; 0: no drafter.
    """

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_rows: int
    drafts: int = 0
    context_length: int = 0


class Open(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Open a request. grammar: llguidance's JSON."""

    order: int
    grammar: str
    stops: Stops = NO_STOPS


class Place(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Place a request in a row. tokens: int32 [position], if a drafter reads them; else empty."""

    order: int
    slot: int
    epoch: int
    position: int
    tokens: bytes = b""


class Take(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Record tokens. orders: int64 [n]. tokens: int32 [n]. drafts: most drafts of a row in the F after these tokens.
    guesses: of these, the drafter's. soon: a later F may have drafts.
    """

    orders: bytes
    tokens: bytes
    drafts: int = 0
    guesses: int = 0
    soon: bool = False


class Close(msgspec.Struct, frozen=True, array_like=True, tag=5):
    order: int


Order = Begin | Open | Place | Take | Close


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """The request gets no more masks.

    reason: a `FinishReason`. STRUCTURE_COST: its grammar exceeds its limits or can't be compiled.
    NOTHING_LEFT: nothing can follow its tokens. STRUCTURE_MISMATCH: its grammar rejects a token that its mask allowed.
    """

    order: int
    reason: int


class Says(msgspec.Struct, frozen=True, array_like=True, tag=102):
    """A message to log. It repeats nothing of a request."""

    what: str


Answer = Lost | Says

_encoder: Final = msgspec.msgpack.Encoder()
_orders: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def frame(message: Order | Answer) -> bytes:
    """Encode length and body, ready to send."""
    return framed(_encoder.encode(message))


def read_order(body: bytes) -> Order:
    """Decode an order. Raises msgspec.MsgspecError."""
    return _orders.decode(body)


def read_answer(body: bytes) -> Answer:
    """Decode an answer. Raises msgspec.MsgspecError."""
    return _answers.decode(body)
