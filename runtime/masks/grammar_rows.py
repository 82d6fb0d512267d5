"""Follows requests with a grammar and writes the masks of their next positions: each row's next one first, because a
launch may wait for it, then those along the drafts that the launch verifies.

The device makes a launch's drafts and does not report them to the host. They follow from known data: from tokens, which
arrive while the launch's F runs, and from forced tokens found earlier, which the device reads in the same memory. So
the drafter's lookup is repeated here. A mismatch only leaves masks missing, which shortens the run.

Independent of sockets and processes: the mask worker passes its orders on.
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
from runahead.runtime.row_record import mask_words
from runahead.runtime.wire.parameters import FinishReason

COMPILED_KEPT: Final = 32  # most recently requested grammars
# a request whose look-ahead took longer gets no more: others wait for their masks meanwhile
_LOOK_AHEAD_NS: Final = 5_000_000
_TOGETHER: Final = 8  # most rows whose masks are written at once
_TOGETHER_NS: Final = 500_000  # after which finished masks are written without waiting for slow ones
_DEAD_END: Final = "NoExtension"  # the error's prefix if no token can follow
_MISMATCH: Final = "doesn't satisfy the grammar"  # the error for a token that a mask allowed
_BITS: Final = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class Matcher(Protocol):
    """The interface of `llguidance.LLMatcher`, which follows a grammar token by token."""

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
    """A requested grammar. matcher: at its beginning; None while it is compiled."""

    matcher: Matcher | None = None
    waiting: list[_Followed] = field(default_factory=list)  # requests


@dataclass(slots=True)
class _Followed:
    """A followed request. matcher: after its tokens; None while its grammar is compiled. slot: -1 before it has a row.
    position: of the token that the next mask is for. newest: the previous token. forced: tokens that the grammar
    required from position `forced_from` on. looks_ahead: search for forced tokens.
    """

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
    """Grammars, requests and masks. memory: receives the masks. compile_soon: takes a grammar's text; `compiled` is
    called later. drafter: equal to the device's; None: only forced drafts. clock: ns, monotonic. spent: this thread's
    processor time in ns.
    """

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
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()  # by text, the latest last
        self._requests: dict[int, _Followed] = {}
        self._by_slot: dict[int, _Followed] = {}  # the latest owner of each slot
        self.lost: list[Lost] = []  # requests that can get no masks, to be reported

    def open(self, order: int, grammar: str, stops: Stops = NO_STOPS) -> None:
        """Follow a queued request."""
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
        """Receive a grammar's matcher; None: compilation failed, and its requests are lost."""
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
        """Record that the request has a row, possibly again, and its tokens so far. tokens: prompt and completion,
        [position], if there is a drafter.
        """
        request = self._requests.get(order)
        if request is not None:
            before = self._by_slot.get(slot)
            if before is not None and before.slot == slot:
                before.slot = -1  # evicted: it must not overwrite the next owner's masks
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
        """Record one token of each of these requests, a request's tokens in order. drafts: most drafts of a row in the
        launch; guesses: of these the drafter's. soon: a later launch may have drafts, so forced tokens are searched.
        [n], [n]
        """
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
        """Stop following the request."""
        self._requests.pop(order, None)

    def _begin(self, request: _Followed, matcher: Matcher) -> None:
        request.matcher = matcher.deep_copy()
        self._write(request)

    def _write(self, request: _Followed) -> None:
        """Write the masks of the request's next positions; it has no drafts yet."""
        self._write_ahead(request, self._write_next([request])[0], guesses=0, has_drafts=False)

    def _write_next(self, requests: Sequence[_Followed]) -> list[NDArray[np.int32] | None]:
        """Write and return the masks of these requests' next positions; None for a request without a row or grammar, or
        that has ended.
        """
        masks = np.zeros((len(requests), self._mask.size), np.int32)
        found: list[NDArray[np.int32] | None] = []
        made: list[int] = []  # not written yet
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
        """Make the mask of the request's next position in `mask`, and return whether there is one."""
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
        """Write forced tokens and the masks along possible drafts. mask: of the request's next position. has_drafts:
        its row may have drafts now; guesses: most of the drafter's.
        """
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
        """Make the mask after `behind` drafts, and return whether there is one (else see `_why`). matcher: after the
        same drafts.
        """
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():  # an error's mask allows an end that is not the grammar's
            return False
        if matcher.is_stopped() and not matcher.is_accepting():
            mask[:] = 0  # nothing can follow an incomplete match: the matcher would allow an end
        if request.position + behind < request.stops.min_position:
            for token in request.stops.token_ids:
                mask[token // 32] &= ~_BITS[token % 32]
        return True

    def _drafted(self, request: _Followed, guesses: int) -> NDArray[np.int32]:
        """Return the launch's known drafts after the request's newest token. [n]"""
        run = tokens_behind(request.forced, request.position - request.forced_from, request.newest)
        if not run.size and self._drafter is not None and guesses:
            proposed = self._drafter.propose(np.array([request.slot]), np.array([request.position]), guesses)[0]
            run = proposed[: int(np.argmin(np.append(proposed, NO_DRAFT) != NO_DRAFT))]
        return run[: self._memory.drafts]

    def _write_forced(self, request: _Followed, matcher: Matcher) -> None:
        """Write the tokens that the grammar requires from the request's next position on, in the tokenizer's usual
        segmentation.
        """
        begun, before = self._clock(), self._spent()
        ahead = matcher.deep_copy()  # a copy, which may exceed limits that the row never reaches
        found = ahead.compute_ff_tokens()
        tokens = np.array([] if ahead.is_error() else found[: self._memory.most_forced], np.int32)
        request.looks_ahead = self._spent() - before < _LOOK_AHEAD_NS
        self._memory.figures[MASK_NS] += self._clock() - begun
        if tokens.size or request.forced.size:
            self._memory.write_forced(request.slot, request.epoch, request.position, tokens.tolist())
        request.forced, request.forced_from = tokens, request.position

    def _write_along(self, request: _Followed, matcher: Matcher, run: NDArray[np.int32]) -> None:
        """Write the masks along these drafts until one is not allowed. matcher: a disposable copy, which may exceed
        limits that the row never reaches.
        """
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
    """Return the finish reason for a matcher's error, from the library's message."""
    error = matcher.get_error()
    if error.startswith(_DEAD_END):
        return FinishReason.NOTHING_LEFT
    return FinishReason.STRUCTURE_MISMATCH if _MISMATCH in error else FinishReason.STRUCTURE_COST
