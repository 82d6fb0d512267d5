"""Requests with a grammar, and the mask of each one's next position, written to its row's line as soon as it is known.

It knows no socket and no process: the mask worker hands it its orders.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.masks.mask_memory import COMPILE_NS, COMPILED, FOUND, MASK_NS, MASKS, MaskMemory
from runahead.runtime.masks.stops import NO_STOPS, Stops
from runahead.runtime.token_mask import mask_words

COMPILED_KEPT: Final = 32  # grammars that were asked for last
_BITS: Final = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class Matcher(Protocol):
    """What follows a grammar token by token: an `llguidance.LLMatcher`."""

    def deep_copy(self) -> Matcher: ...

    def consume_token(self, token: int) -> bool: ...

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...

    def is_error(self) -> bool: ...

    def is_stopped(self) -> bool: ...

    def is_accepting(self) -> bool: ...


@dataclass(slots=True)
class _Grammar:
    """A grammar that somebody asked for. matcher: at its beginning; None while it is compiled."""

    matcher: Matcher | None = None
    waiting: list[_Followed] = field(default_factory=list)  # requests


@dataclass(slots=True)
class _Followed:
    """A request. matcher: behind its tokens; None while its grammar is compiled. slot: -1 before it has a row.
    position: of the token that the next mask is for."""

    order: int
    stops: Stops
    matcher: Matcher | None = None
    slot: int = -1
    epoch: int = 0
    position: int = 0


class GrammarRows:
    """memory: where masks go. compile_soon: takes a grammar's text; `compiled` is called when that is done.
    clock: ns, monotonic."""

    def __init__(
        self,
        memory: MaskMemory,
        vocab_size: int,
        compile_soon: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._memory = memory
        self._compile_soon = compile_soon
        self._clock = clock
        self._mask: NDArray[np.int32] = np.zeros(mask_words(vocab_size), np.int32)
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()  # by their text, asked for last at the end
        self._requests: dict[int, _Followed] = {}
        self._by_slot: dict[int, _Followed] = {}  # who was given the slot last
        self.lost: list[int] = []  # requests that no mask can be made for, not told yet

    def open(self, order: int, grammar: str, stops: Stops = NO_STOPS) -> None:
        """A request with a grammar is queued."""
        request = self._requests[order] = _Followed(order, stops)
        known = self._grammars.get(grammar)
        if known is None:
            known = self._grammars[grammar] = _Grammar()
            self._compile_soon(grammar)
        else:
            self._memory.figures[FOUND] += 1
            self._grammars.move_to_end(grammar)
        if known.matcher is None:
            known.waiting.append(request)
        else:
            self._begin(request, known.matcher)

    def compiled(self, grammar: str, matcher: Matcher | None, took_ns: int) -> None:
        """The grammar's matcher; None: it has none, and its requests are lost."""
        self._memory.figures[COMPILED] += 1
        self._memory.figures[COMPILE_NS] += took_ns
        known = self._grammars[grammar]
        waiting, known.waiting = known.waiting, []
        if matcher is None:
            del self._grammars[grammar]
            for request in waiting:
                self._lose(request)
            return
        known.matcher = matcher
        for request in waiting:
            self._begin(request, matcher)
        while len(self._grammars) > COMPILED_KEPT and next(iter(self._grammars.values())).matcher is not None:
            self._grammars.popitem(last=False)

    def place(self, order: int, slot: int, epoch: int, position: int) -> None:
        """The request has a row, again perhaps: its tokens so far are those that it has taken."""
        request = self._requests.get(order)
        if request is not None:
            before = self._by_slot.get(slot)
            if before is not None and before.slot == slot:
                before.slot = -1  # it was evicted, and writes no masks over those of whoever comes after it
            self._by_slot[slot] = request
            request.slot, request.epoch, request.position = slot, epoch, position
            self._write(request)

    def take(self, orders: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Each of these requests has got this token. [n], [n]"""
        for order, token in zip(orders.tolist(), tokens.tolist(), strict=True):
            request = self._requests.get(order)
            if request is None:
                continue  # it was lost
            assert request.matcher is not None, "a token was sampled under no mask"
            request.position += 1
            if request.matcher.consume_token(token):
                self._write(request)
            else:
                self._lose(request)

    def close(self, order: int) -> None:
        """The request has ended."""
        self._requests.pop(order, None)

    def _begin(self, request: _Followed, matcher: Matcher) -> None:
        request.matcher = matcher.deep_copy()
        self._write(request)

    def _write(self, request: _Followed) -> None:
        """The mask of the request's next position, if it has a row and its grammar is there, and it has not ended."""
        if request.matcher is None or request.slot < 0 or request.order not in self._requests:
            return
        begun = self._clock()
        request.matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if request.matcher.is_error():  # its mask allows an end, which is not the grammar's
            self._lose(request)
            return
        if request.matcher.is_stopped() and not request.matcher.is_accepting():
            self._mask[:] = 0  # nothing can follow, and nothing is complete: the matcher itself would allow an end
        if request.position < request.stops.min_position:
            for token in request.stops.token_ids:
                self._mask[token // 32] &= ~_BITS[token % 32]
        self._memory.write(request.slot, request.epoch, request.position, self._mask)
        self._memory.figures[MASKS] += 1
        self._memory.figures[MASK_NS] += self._clock() - begun

    def _lose(self, request: _Followed) -> None:
        if self._requests.pop(request.order, None) is not None:
            self.lost.append(request.order)
