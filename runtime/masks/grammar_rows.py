"""Requests with a grammar, and the masks of each one's next positions, written to its row's lines as soon as they are
known: that of the next position first, which a launch may wait for, and when every row has that, those along the drafts
that the launch verifies.

A launch's drafts are made on its device, from what its S has left, and nobody tells them to the host. They follow from
what is known here: from the tokens, which come while the launch's F runs, and from what the grammar was found to force
before, which the device reads in the same place. So they are made once more. Where that misses, a mask is missing, and
the run ends before it: no token hangs on it.

It knows no socket and no process: the mask worker hands it its orders.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.drafters.ngram import NO_DRAFT, Drafter
from runahead.runtime.masks.mask_memory import (
    ASKED,
    COMPILE_NS,
    COMPILED,
    FOUND,
    MASK_NS,
    MASKS,
    NO_RUN,
    MaskMemory,
    tokens_behind,
)
from runahead.runtime.masks.masks import NO_STOPS, Stops
from runahead.runtime.masks.worker_messages import Lost
from runahead.runtime.token_mask import mask_words
from runahead.runtime.wire.parameters import FinishReason

COMPILED_KEPT: Final = 32  # grammars that were asked for last
_LOOK_NS: Final = 5_000_000  # a look ahead that took longer is a request's last: others wait for their masks meanwhile
_TOGETHER: Final = 8  # rows whose masks are written at once, at most
_TOGETHER_NS: Final = 500_000  # beyond which those that are made are written: nobody waits for one that is slow
_DEAD_END: Final = "NoExtension"  # how an error begins where no token can follow
_MISMATCH: Final = "doesn't satisfy the grammar"  # of a token that a mask allowed
_BITS: Final = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class Matcher(Protocol):
    """What follows a grammar token by token: an `llguidance.LLMatcher`."""

    def deep_copy(self) -> Matcher: ...

    def consume_token(self, token: int) -> bool: ...

    def compute_ff_tokens(self) -> list[int]: ...

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

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
    position: of the token that the next mask is for. newest: the token before. forced: what had to come from position
    `forced_from` on, as its grammar said there. looks_ahead: what is forced is looked for."""

    order: int
    stops: Stops
    matcher: Matcher | None = None
    slot: int = -1
    epoch: int = 0
    position: int = 0
    newest: int = -1
    forced: NDArray[np.int32] = field(default_factory=lambda: NO_RUN)
    forced_from: int = 0
    looks_ahead: bool = True


class GrammarRows:
    """memory: where masks go. compile_soon: takes a grammar's text; `compiled` is called when that is done. drafter:
    one like the device's; None: nothing is drafted but what grammars force. clock: ns, monotonic. spent: ns of the
    processor's time that this thread has taken."""

    def __init__(
        self,
        memory: MaskMemory,
        vocab_size: int,
        compile_soon: Callable[[str], None],
        drafter: Drafter | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        spent: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._memory = memory
        self._compile_soon = compile_soon
        self._drafter = drafter
        self._clock = clock
        self._spent = spent
        self._mask: NDArray[np.int32] = np.zeros(mask_words(vocab_size), np.int32)
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()  # by their text, asked for last at the end
        self._requests: dict[int, _Followed] = {}
        self._by_slot: dict[int, _Followed] = {}  # who was given the slot last
        self.lost: list[Lost] = []  # requests that no mask can be made for, not told yet

    def open(self, order: int, grammar: str, stops: Stops = NO_STOPS) -> None:
        """A request with a grammar is queued."""
        request = self._requests[order] = _Followed(order, stops)
        known = self._grammars.get(grammar)
        if known is None:
            known = self._grammars[grammar] = _Grammar()
            self._memory.figures[ASKED] += 1
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
                self._lose(request, FinishReason.STRUCTURE_COST)
            return
        known.matcher = matcher
        for request in waiting:
            self._begin(request, matcher)
        while len(self._grammars) > COMPILED_KEPT and next(iter(self._grammars.values())).matcher is not None:
            self._grammars.popitem(last=False)

    def place(self, order: int, slot: int, epoch: int, position: int, tokens: NDArray[np.int32] = NO_RUN) -> None:
        """The request has a row, again perhaps: its tokens so far are those that it has taken. tokens: prompt and
        completion, [position], if there is a drafter."""
        request = self._requests.get(order)
        if request is not None:
            before = self._by_slot.get(slot)
            if before is not None and before.slot == slot:
                before.slot = -1  # it was evicted, and writes no masks over those of whoever comes after it
            self._by_slot[slot] = request
            request.slot, request.epoch, request.position = slot, epoch, position
            request.forced = NO_RUN
            if self._drafter is not None:
                self._drafter.read(slot, 0, tokens)
            self._write(request)

    def take(
        self, orders: NDArray[np.int64], tokens: NDArray[np.int32], drafts: int = 0, guesses: int = 0, *,
        soon: bool = False,
    ) -> None:  # fmt: skip
        """Each of these requests has got this token. Several of one come in their order. drafts: that the launch may
        have of each row behind them, at most; guesses: of these the drafter's. soon: a launch behind it may have some,
        too, so that what must come is looked for. [n], [n]"""
        moved: dict[int, _Followed] = {}
        for order, token in zip(orders.tolist(), tokens.tolist(), strict=True):
            request = self._requests.get(order)
            if request is None:
                continue  # it was lost
            assert request.matcher is not None, "a token was sampled under no mask"
            if not request.matcher.consume_token(token):
                self._lose(request, _why(request.matcher))
                continue
            if self._drafter is not None and request.slot >= 0:
                self._drafter.took(np.array([request.slot]), np.array([request.position]), np.array([token], np.int32))
            request.position += 1
            request.newest = token
            moved[order] = request
        requests = list(moved.values())
        masks = self._write_next(requests)
        if drafts or soon:
            for request, mask in zip(requests, masks, strict=True):
                self._write_ahead(request, mask, guesses, has_drafts=drafts > 0)

    def close(self, order: int) -> None:
        """The request has ended."""
        self._requests.pop(order, None)

    def _begin(self, request: _Followed, matcher: Matcher) -> None:
        request.matcher = matcher.deep_copy()
        self._write(request)

    def _write(self, request: _Followed) -> None:
        """The masks of the request's next positions, of which it has drafted none."""
        self._write_ahead(request, self._write_next([request])[0], guesses=0, has_drafts=False)

    def _write_next(self, requests: Sequence[_Followed]) -> list[NDArray[np.int32] | None]:
        """The masks of these requests' next positions, which are returned; None: the request has no row, or its grammar
        is not there, or it has ended."""
        masks = np.zeros((len(requests), self._mask.size), np.int32)
        found: list[NDArray[np.int32] | None] = []
        made: list[int] = []  # and not written yet
        begun = self._clock()
        for i, request in enumerate(requests):
            is_made = self._makes_next(request, masks[i])
            found.append(masks[i] if is_made else None)
            if is_made:
                made.append(i)
            taken = self._clock() - begun
            if len(made) < _TOGETHER and taken < _TOGETHER_NS and i + 1 < len(requests):
                continue
            if made:
                tags = [(one.slot, one.epoch, one.position) for one in map(requests.__getitem__, made)]
                self._memory.write_next(np.array(tags, np.int64), masks[made])
            self._memory.figures[MASKS] += len(made)
            self._memory.figures[MASK_NS] += self._clock() - begun
            made, begun = [], self._clock()
        return found

    def _makes_next(self, request: _Followed, mask: NDArray[np.int32]) -> bool:
        """The mask of the request's next position is made, in `mask`."""
        matcher = request.matcher
        if matcher is None or request.slot < 0 or request.order not in self._requests:
            return False
        is_made = self._make(request, matcher, mask, 0)
        if not is_made:
            self._lose(request, _why(matcher))
        return is_made

    def _write_ahead(
        self, request: _Followed, mask: NDArray[np.int32] | None, guesses: int, *, has_drafts: bool
    ) -> None:
        """What must come, and the masks along what may. mask: of the request's next position. has_drafts: its row may
        have drafts now; guesses: so many of the drafter's, at most."""
        matcher = request.matcher
        if mask is None or matcher is None or not self._memory.drafts:
            return
        run = self._drafted(request, guesses) if has_drafts else NO_RUN
        if request.looks_ahead:
            self._write_forced(request, matcher)
        if run.size:
            self._mask[:] = mask
            self._write_along(request, matcher.deep_copy(), run)

    def _make(self, request: _Followed, matcher: Matcher, mask: NDArray[np.int32], behind: int) -> bool:
        """The mask behind so many drafts is made, in `mask`. matcher: behind them too. False: it has none, see
        `_why`."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():  # its mask allows an end, which is not the grammar's
            return False
        if matcher.is_stopped() and not matcher.is_accepting():
            mask[:] = 0  # nothing can follow, and nothing is complete: the matcher itself would allow an end
        if request.position + behind < request.stops.min_position:
            for token in request.stops.token_ids:
                mask[token // 32] &= ~_BITS[token % 32]
        return True

    def _drafted(self, request: _Followed, guesses: int) -> NDArray[np.int32]:
        """What the launch has drafted behind the request's newest token, as far as it is known here. [n]"""
        run = tokens_behind(request.forced, request.position - request.forced_from, request.newest)
        if not run.size and self._drafter is not None and guesses:
            proposed = self._drafter.propose(np.array([request.slot]), np.array([request.position]), guesses)[0]
            run = proposed[: int(np.argmin(np.append(proposed, NO_DRAFT) != NO_DRAFT))]
        return run[: self._memory.drafts]

    def _write_forced(self, request: _Followed, matcher: Matcher) -> None:
        """What must come from the request's next position on, in the tokens that a text is made of when it is read."""
        begun, before = self._clock(), self._spent()
        ahead = matcher.deep_copy()  # which may come to limits that the row itself never meets
        found = ahead.compute_ff_tokens()
        tokens = np.array([] if ahead.is_error() else found[: self._memory.most_forced], np.int32)
        request.looks_ahead = self._spent() - before < _LOOK_NS
        self._memory.figures[MASK_NS] += self._clock() - begun
        if tokens.size or request.forced.size:
            self._memory.write_forced(request.slot, request.epoch, request.position, tokens.tolist())
        request.forced, request.forced_from = tokens, request.position

    def _write_along(self, request: _Followed, matcher: Matcher, run: NDArray[np.int32]) -> None:
        """The masks behind the first of these drafts, the first two, and so on, until one is not allowed. matcher: one
        that nobody needs afterwards: where it comes to its limits, the row itself may never get there."""
        for count in range(1, run.size + 1):
            begun, token = self._clock(), int(run[count - 1])
            if not self._mask[token // 32] & _BITS[token % 32] or not matcher.consume_token(token):
                return
            if not self._make(request, matcher, self._mask, count):
                return
            self._memory.write_behind(request.slot, request.epoch, request.position, self._mask, run[:count])
            self._memory.figures[MASKS] += 1
            self._memory.figures[MASK_NS] += self._clock() - begun

    def _lose(self, request: _Followed, reason: FinishReason) -> None:
        if self._requests.pop(request.order, None) is not None:
            self.lost.append(Lost(request.order, reason))


def _why(matcher: Matcher) -> FinishReason:
    """Why a matcher that is in an error follows its request no further, by the library's words."""
    error = matcher.get_error()
    if error.startswith(_DEAD_END):
        return FinishReason.NOTHING_LEFT
    return FinishReason.STRUCTURE_MISMATCH if _MISMATCH in error else FinishReason.STRUCTURE_COST
