"""Masks that come late, as a seed says, on the simulated device: the worker's own bookkeeping over made-up grammars."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.drafters.ngram import Drafter, NgramDrafter
from runahead.runtime.masks.grammar_rows import GrammarRows
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.masks.masks import NO_STOPS, GivenUp, MaskFigures, Masks, Stops
from runahead.runtime.row_record import token_mask
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.chain import Chain, make_chain
from tests.runtime.programs.hash_model import EOS, VOCAB
from tests.runtime.programs.hash_program import HashProgram


class MadeUpMatcher:
    """Which tokens may come next is a function of the grammar's text and of all tokens before. The text ends with the
    number of tokens behind which nothing but an end may come; one of `nothing` allows nothing there. One of `one`
    allows a single token everywhere, one of `some` at six positions of seven, and says the same again and again."""

    def __init__(self, grammar: str, said: tuple[int, ...] = (), vocab: int = VOCAB) -> None:
        self._grammar = grammar
        self._vocab = vocab
        self._said = said

    def allowed(self) -> list[int]:
        """The tokens that may come next."""
        kind, length = self._grammar.split()
        if len(self._said) >= int(length):
            return [] if kind == "nothing" else [EOS]
        dice = random.Random(f"{self._grammar} {self._said}")
        if kind == "some":
            return [2 + len(self._said) % 5] if len(self._said) % 7 else dice.sample(range(2, self._vocab), 9)
        return dice.sample(range(2, self._vocab), 1 if kind == "one" else dice.choice((1, 2, 20)))

    def deep_copy(self) -> MadeUpMatcher:
        return MadeUpMatcher(self._grammar, self._said, self._vocab)

    def consume_token(self, token: int) -> bool:
        assert token in self.allowed(), "a token was drawn that the mask of its place does not allow"
        self._said = (*self._said, token)
        return True

    def compute_ff_tokens(self) -> list[int]:
        """As long as there is one token alone that may come."""
        forced: list[int] = []
        ahead = self.deep_copy()
        while len(allowed := ahead.allowed()) == 1 and len(forced) < 8 and allowed[0] != EOS:
            forced += allowed
            ahead.consume_token(allowed[0])
        return forced

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        ctypes.memmove(trg_pointer, token_mask(self.allowed(), self._vocab).tobytes(), trg_byte_size)

    def get_error(self) -> str:
        return ""

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return not self.allowed()

    def is_accepting(self) -> bool:
        return False


class LateMasks(Masks):
    """A `Masks` whose worker carries out as many of its orders at each look as the dice say. seed None: all at once."""

    def __init__(
        self, max_rows: int, seed: int | None, drafts: int = 0, drafter: Drafter | None = None, vocab: int = VOCAB
    ) -> None:
        self.memory = MaskMemory(max_rows, vocab, drafts)
        self._vocab = vocab
        self.stopped = False
        self.handled = 0  # orders, and grammars that were compiled
        self.rests = 0  # looks that found orders, or a grammar to compile, and left all of it for later
        self._dice = None if seed is None else random.Random(seed)
        self._orders: deque[Callable[[], None]] = deque()
        self._compiling: deque[str] = deque()
        self._rows = GrammarRows(self.memory, vocab, self._compiling.append, drafter, spent=lambda: 0)
        self._lost: list[GivenUp] = []

    def lose(self, order: int) -> None:
        """The next look finds that no mask can be made for this request."""
        self._lost.append(GivenUp(order, FinishReason.STRUCTURE_COST))

    def open(self, order: int, grammar: str, stops: Stops = NO_STOPS) -> None:
        self._add(self._rows.open, order, grammar, stops)

    def place(self, order: int, slot: int, epoch: int, tokens: NDArray[np.int32]) -> None:
        self._add(self._rows.place, order, slot, epoch, tokens.size, tokens)

    def take(
        self, orders: NDArray[np.int64], tokens: NDArray[np.int32], drafts: int = 0, guesses: int = 0, *,
        soon: bool = False,
    ) -> None:  # fmt: skip
        self._add(partial(self._rows.take, soon=soon), orders, tokens.copy(), drafts, guesses)

    def close(self, order: int) -> None:
        self._add(self._rows.close, order)

    def given_up(self, now: float) -> Sequence[GivenUp]:
        waiting = len(self._orders) + len(self._compiling)
        for _ in range(self._dice.choice((0, 0, 1, 2, 5)) if self._dice else len(self._orders)):
            if self._orders:
                self._orders.popleft()()
        self._compile()
        done = waiting - len(self._orders) - len(self._compiling)
        self.handled += max(0, done)
        self.rests += done == 0 < waiting
        lost, self._lost = self._lost, []
        return lost

    def figures(self) -> MaskFigures:
        return MaskFigures(orders_waiting=len(self._orders))

    def stop(self) -> None:
        self.stopped = True

    def _add(self, order: Callable[..., None], *said: Any) -> None:
        self._orders.append(lambda: order(*said))
        if self._dice is None:
            self.given_up(0.0)

    def _compile(self) -> None:
        if self._compiling and (self._dice is None or self._dice.random() < 0.4):
            grammar = self._compiling.popleft()
            self._rows.compiled(grammar, MadeUpMatcher(grammar, vocab=self._vocab), 0)


def make_masked_chain(
    depth: int, seed: int | None, max_rows: int = 4, *, drafts: int = 0, forced_drafts: int = 0, **options: Any
) -> tuple[Chain, LateMasks]:
    """A chain whose masks come as `LateMasks` says. drafts: of a row, by `ngram`; 0: no drafter. forced_drafts: of a
    row with a grammar."""
    context = options.get("context_length", 128)
    drafters = [NgramDrafter(max_rows, context) if drafts else None for _ in range(2)]
    masks = LateMasks(max_rows, seed, max(drafts, forced_drafts), drafters[0])

    class MaskedProgram(HashProgram):
        def __init__(self, *parts: Any, **sizes: Any) -> None:
            super().__init__(*parts, **sizes, masks=masks.memory, drafter=drafters[1])

    made = make_chain(
        depth, max_rows=max_rows, program_type=MaskedProgram, masks=masks, drafts=drafts, forced_drafts=forced_drafts,
        **options,
    )  # fmt: skip
    return made, masks
