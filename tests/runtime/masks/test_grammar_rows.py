"""Requests with a grammar, as the mask worker keeps them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray
from tokenizers import Tokenizer

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.runtime.drafters.ngram import NgramDrafter
from runahead.runtime.grammar.matcher import load_vocabulary, new_matcher
from runahead.runtime.masks.grammar_rows import COMPILED_KEPT, GrammarRows
from runahead.runtime.masks.mask_memory import COMPILED, FOUND, MASKS, MaskMemory
from runahead.runtime.masks.worker_messages import Lost
from runahead.runtime.row_record import token_mask
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.late_masks import MadeUpMatcher
from tests.runtime.masks.one_row import read_mask
from tests.runtime.programs.hash_model import EOS, VOCAB


class Kept:
    """Grammar rows, and the grammars that they want compiled."""

    def __init__(
        self, drafts: int = 0, drafter: NgramDrafter | None = None, spent: Callable[[], int] = lambda: 0
    ) -> None:
        self.memory = MaskMemory(4, VOCAB, drafts)
        self.wanted: list[str] = []
        self.rows = GrammarRows(self.memory, VOCAB, self.wanted.append, drafter, spent=spent)

    def compile(self, grammar: str, matcher: MadeUpMatcher | None = None) -> None:
        self.rows.compiled(grammar, matcher or MadeUpMatcher(grammar), 5)

    def take(self, order: int, *tokens: int, guesses: int = 0) -> None:
        orders = np.full(len(tokens), order, np.int64)
        self.rows.take(orders, np.array(tokens, np.int32), self.memory.drafts, guesses)

    def allowed(self, slot: int, epoch: int, position: int, *run: int) -> list[int] | None:
        found = read_mask(self.memory, slot, epoch, position, np.array(run, np.int32))
        return None if found is None else [one for one in range(VOCAB) if found[one // 32] >> one % 32 & 1]


def test_a_mask_is_written_once_the_grammar_and_the_row_are_there_whichever_comes_first() -> None:
    kept, first = Kept(), sorted(MadeUpMatcher("any 5").allowed())
    kept.rows.open(1, "any 5")
    kept.rows.place(1, 0, 3, 10)
    assert kept.allowed(0, 3, 10) is None
    kept.compile("any 5")
    assert kept.allowed(0, 3, 10) == first
    kept.rows.open(2, "any 5")
    kept.rows.place(2, 1, 4, 20)
    assert kept.allowed(1, 4, 20) == first and kept.wanted == ["any 5"], "it is compiled once"
    assert (kept.memory.figures[COMPILED], kept.memory.figures[FOUND], kept.memory.figures[MASKS]) == (1, 1, 2)


def test_a_token_brings_the_mask_of_the_next_position() -> None:
    kept = Kept()
    kept.rows.open(1, "any 5")
    kept.compile("any 5")
    kept.rows.place(1, 0, 3, 10)
    token = MadeUpMatcher("any 5").allowed()[0]
    kept.take(1, token)
    assert kept.allowed(0, 3, 10) is None
    assert kept.allowed(0, 3, 11) == sorted(MadeUpMatcher("any 5", (token,)).allowed())


def test_an_end_that_is_text_too_may_not_come_before_the_grammar_is_complete() -> None:
    """A checkpoint may name an end that its tokenizer has as any other token."""
    tokenizer = (BUNDLED_FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    known = Tokenizer.from_str(tokenizer)
    the, end, two = known.token_to_id("the"), known.token_to_id("Ġs"), known.encode(" s s").ids
    assert end is not None and set(two) == {end}
    vocabulary, vocab_size = load_vocabulary(tokenizer, known.get_vocab_size(), [end]), known.get_vocab_size()
    rows = GrammarRows(MaskMemory(1, vocab_size), vocab_size, lambda grammar: None)
    for order, text, may_end in ((1, "the( s){2}|the firs", False), (2, "the( s){0,2}|the firs", True)):
        rows.open(order, text)
        rows.compiled(text, new_matcher(vocabulary, LLMatcher.grammar_from_regex(text)), 5)
        rows.place(order, 0, order, 10)
        rows.take(np.array([order]), np.array([the], np.int32))
        mask = read_mask(rows._memory, 0, order, 11)
        assert mask is not None and mask.any()
        assert bool(mask[end // 32] >> end % 32 & 1) is may_end
        rows.close(order)


def test_a_row_that_moved_writes_no_mask_over_those_of_who_has_its_slot_now() -> None:
    """It was evicted while its grammar was compiled."""
    kept = Kept()
    kept.rows.open(1, "slow 5")
    kept.rows.place(1, 0, 3, 10)
    kept.rows.open(2, "any 5")
    kept.compile("any 5")
    kept.rows.place(2, 0, 5, 12)
    kept.compile("slow 5")
    assert kept.allowed(0, 5, 12) is not None
    kept.rows.place(1, 1, 2, 10)
    assert kept.allowed(1, 2, 10) is not None, "it has another row now"
    kept.rows.open(3, "any 5")
    kept.rows.place(3, 0, 7, 4)
    kept.take(1, MadeUpMatcher("slow 5").allowed()[0])
    assert kept.allowed(1, 2, 11) is not None, "whoever comes into its old slot takes nothing from it"


def test_a_grammar_that_is_none_loses_its_requests_alone() -> None:
    kept = Kept()
    for order, grammar in ((1, "bad 5"), (2, "any 5"), (3, "bad 5")):
        kept.rows.open(order, grammar)
    kept.rows.compiled("bad 5", None, 5)
    kept.compile("any 5")
    assert kept.rows.lost == [Lost(1, FinishReason.STRUCTURE_COST), Lost(3, FinishReason.STRUCTURE_COST)]
    kept.rows.place(1, 0, 1, 4)
    kept.take(1, 9)
    kept.rows.close(1)
    kept.rows.place(2, 1, 1, 4)
    assert kept.allowed(0, 1, 4) is None and kept.allowed(1, 1, 4) is not None


def test_a_matcher_in_trouble_loses_its_request_and_writes_no_mask() -> None:
    class Troubled(MadeUpMatcher):
        """Its mask allows an end, which is not the grammar's."""

        def deep_copy(self) -> MadeUpMatcher:
            return self

        def is_error(self) -> bool:
            return True

    kept = Kept()
    kept.rows.open(1, "any 5")
    kept.compile("any 5", Troubled("any 5"))
    kept.rows.place(1, 0, 1, 4)
    assert kept.rows.lost == [Lost(1, FinishReason.STRUCTURE_COST)] and kept.allowed(0, 1, 4) is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("a{", FinishReason.STRUCTURE_MISMATCH),  # beside the mask
        ('{"a":8,', FinishReason.NOTHING_LEFT),
    ],
)
def test_the_reason_travels_with_a_request_that_is_followed_no_further(said: str, reason: FinishReason) -> None:
    """The library lets the comma through, though no name is left."""
    schema = (
        '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],'
        '"patternProperties":{"^a$":{"type":"integer"}},"additionalProperties":false,'
        '"x-guidance":{"whitespace_flexible":false}}'
    )
    text = '{"grammars":[{"json_schema":' + schema + "}]}"
    tokenizer = (BUNDLED_FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = load_vocabulary(tokenizer, 4096, [0])
    rows = GrammarRows(MaskMemory(1, 4096), 4096, lambda grammar: None)
    rows.open(1, text)
    rows.compiled(text, new_matcher(vocabulary, text), 5)
    rows.place(1, 0, 1, 10)
    for token in vocabulary.tokenize_str(said):
        rows.take(np.array([1]), np.array([token], np.int32))
    assert rows.lost == [Lost(1, reason)]


def test_where_nothing_can_follow_and_nothing_is_complete_the_mask_allows_nothing() -> None:
    class DeadEnd(MadeUpMatcher):
        """Its own mask allows an end, as the library's does."""

        def deep_copy(self) -> MadeUpMatcher:
            return self

        def allowed(self) -> list[int]:
            return [1]

        def is_stopped(self) -> bool:
            return True

    kept = Kept()
    kept.rows.open(1, "any 5")
    kept.compile("any 5", DeadEnd("any 5"))
    kept.rows.place(1, 0, 1, 4)
    assert kept.allowed(0, 1, 4) == []


def test_as_many_grammars_are_kept_as_were_asked_for_last() -> None:
    kept = Kept()
    for number in range(COMPILED_KEPT + 1):
        kept.rows.open(number, f"any {number}")
        kept.compile(f"any {number}")
    kept.rows.open(1000, f"any {COMPILED_KEPT}")
    assert len(kept.wanted) == COMPILED_KEPT + 1
    kept.rows.open(1001, "any 0")
    assert kept.wanted[-1] == "any 0" and len(kept.wanted) == COMPILED_KEPT + 2, "the first one was forgotten"
    assert token_mask([1], VOCAB).size == 4


def said(grammar: str, count: int) -> list[int]:
    """Tokens that a grammar allows, one after the other."""
    matcher, tokens = MadeUpMatcher(grammar), list[int]()
    for _ in range(count):
        tokens.append(matcher.allowed()[0])
        matcher.consume_token(tokens[-1])
    return tokens


def test_what_must_come_is_written_and_then_the_masks_behind_each_of_it_that_a_launch_has_drafted() -> None:
    """The row goes on by the first forced token: the launch then drafts those behind it."""
    kept, tokens = Kept(drafts=3), said("one 9", 9)
    kept.rows.open(1, "one 9")
    kept.compile("one 9")
    kept.rows.place(1, 0, 3, 10)
    assert kept.memory.read_forced(0, 3, 10, -1, 9).tolist() == tokens[:8]
    assert kept.allowed(0, 3, 10) == tokens[:1] and kept.allowed(0, 3, 10, tokens[0]) is None, "nothing is drafted yet"
    kept.take(1, tokens[0])
    for count in range(4):
        assert kept.allowed(0, 3, 11, *tokens[1 : 1 + count]) == [tokens[1 + count]]
    kept.take(1, *tokens[1:5])
    assert kept.allowed(0, 3, 15) == [tokens[5]], "several tokens of a launch are one step"
    assert kept.allowed(0, 3, 15, *tokens[5:8]) == [tokens[8]]
    assert kept.allowed(0, 3, 12) is None and kept.allowed(0, 3, 14) is None


def test_masks_are_made_along_what_the_drafter_of_the_device_has_guessed() -> None:
    """The tokens repeat themselves, so that it guesses right, as far as it may guess at all."""
    drafters = [NgramDrafter(4, 64) for _ in range(2)]
    kept, grammar = Kept(3, drafters[0]), "any 5"
    tokens, prompt = said(grammar, 3), np.array([*said(grammar, 3), 90, 91], np.int32)
    drafters[1].read(0, 0, np.append(prompt, tokens[0]))
    guessed = drafters[1].propose(np.array([0]), np.array([6]), 3)[0]
    assert guessed[0] == tokens[1]
    for guesses in (0, 1):
        kept.rows.open(guesses, grammar)
        if not guesses:
            kept.compile(grammar)
        kept.rows.place(guesses, 0, 3 + guesses, 5, prompt)
        kept.take(guesses, tokens[0], guesses=guesses)
        assert kept.allowed(0, 3 + guesses, 6) is not None
        assert (kept.allowed(0, 3 + guesses, 6, tokens[1]) is not None) == bool(guesses)


def test_what_must_come_is_looked_for_before_a_launch_has_drafts_if_one_may_soon() -> None:
    """No mask is made along anything: nothing was drafted."""
    kept, tokens = Kept(drafts=3), said("one 9", 9)
    kept.rows.open(1, "one 9")
    kept.compile("one 9")
    kept.rows.place(1, 0, 3, 10)
    for at in range(7):
        kept.rows.take(np.array([1]), np.array([tokens[at]], np.int32), soon=True)
        assert kept.memory.read_forced(0, 3, 11 + at, tokens[at], 9).tolist() == tokens[at + 1 :][:8]
        assert kept.allowed(0, 3, 11 + at, tokens[at + 1]) is None


def test_where_a_launch_has_no_drafts_nobody_looks_for_what_must_come() -> None:
    kept, tokens = Kept(drafts=3), said("one 9", 9)
    kept.rows.open(1, "one 9")
    kept.compile("one 9")
    kept.rows.place(1, 0, 3, 10)
    for at in range(8):  # as far as was known when the row began
        kept.rows.take(np.array([1]), np.array([tokens[at]], np.int32))
        assert kept.allowed(0, 3, 11 + at) == [tokens[at + 1]]
        assert kept.allowed(0, 3, 11 + at, tokens[at + 1]) is None
    assert not kept.memory.read_forced(0, 3, 18, tokens[7], 9).size
    kept.take(1, tokens[8])
    assert kept.memory.read_forced(0, 3, 19, tokens[8], 9).size == 0 and kept.allowed(0, 3, 19) == [EOS]


def test_rows_wait_for_no_more_than_a_few_others_masks() -> None:
    """Masks are written some at a time, and one that took long at once: the clock of this test is not the machine's."""
    kept, seen, slow, now_ns = Kept(), list[int](), set[int](), 0

    class Watched(MadeUpMatcher):
        """Counts the masks that are there when its own is made."""

        def deep_copy(self) -> MadeUpMatcher:
            return Watched(self._grammar, self._said)

        def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
            nonlocal now_ns
            now_ns += 1_000_000 if len(seen) in slow else 1_000
            seen.append(int(kept.memory.figures[MASKS]))
            super().unsafe_compute_mask_ptr(trg_pointer, trg_byte_size)

    kept.memory = MaskMemory(20, VOCAB)
    kept.rows = GrammarRows(kept.memory, VOCAB, kept.wanted.append, clock=lambda: now_ns)
    kept.rows.open(0, "any 5")
    kept.compile("any 5", Watched("any 5"))
    for order in range(20):
        if order:
            kept.rows.open(order, "any 5")
        kept.rows.place(order, order, 3, 10)
    for token in said("any 5", 2):
        before = len(seen)
        kept.rows.take(np.arange(20), np.full(20, token, np.int32))
        there = [0] * 3 + [3] * 8 + [11] + [12] * 8 if slow else [0] * 8 + [8] * 8 + [16] * 4
        assert [count - before for count in seen[before:]] == there
        slow.update((len(seen) + 2, len(seen) + 11))


def test_limits_that_are_met_along_drafts_are_not_the_rows() -> None:
    """It may go another way, and whatever is left of the run is cut off."""

    class Limited(MadeUpMatcher):
        """It comes to its limits behind four tokens."""

        def deep_copy(self) -> MadeUpMatcher:
            return Limited(self._grammar, self._said)

        def is_error(self) -> bool:
            return len(self._said) >= 4

    kept, tokens = Kept(drafts=5), said("one 9", 9)
    kept.rows.open(1, "one 9")
    kept.compile("one 9", Limited("one 9"))
    kept.rows.place(1, 0, 3, 10)
    kept.take(1, tokens[0])
    assert not kept.rows.lost
    assert kept.allowed(0, 3, 11, *tokens[1:3]) == [tokens[3]] and kept.allowed(0, 3, 11, *tokens[1:4]) is None


def test_every_row_has_its_next_mask_before_any_has_those_along_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row waits for that one alone, and a long run of another's is not to stand before it."""
    kept, tokens, written = Kept(drafts=3), said("one 9", 9), list[tuple[int, int]]()
    kept.rows.open(0, "one 9")
    kept.compile("one 9")
    for order in (0, 1, 2):
        if order:
            kept.rows.open(order, "one 9")
        kept.rows.place(order, order, 3, 10)
    write, write_next = MaskMemory.write_behind, MaskMemory.write_next

    def written_down(
        memory: MaskMemory, slot: int, epoch: int, position: int, mask: NDArray[np.int32], run: NDArray[np.int32]
    ) -> None:
        written.append((run.size, slot))
        write(memory, slot, epoch, position, mask, run)

    def written_first(memory: MaskMemory, tags: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        written.extend((0, slot) for slot, _, _ in tags.tolist())
        write_next(memory, tags, masks)

    monkeypatch.setattr(MaskMemory, "write_behind", written_down)
    monkeypatch.setattr(MaskMemory, "write_next", written_first)
    kept.rows.take(np.arange(3), np.full(3, tokens[0], np.int32), drafts=3)
    assert written == [(0, 0), (0, 1), (0, 2)] + [(size, slot) for slot in range(3) for size in (1, 2, 3)]
    for order in range(3):
        assert kept.allowed(order, 3, 11, *tokens[1:4]) == [tokens[4]]


def test_a_look_ahead_that_took_long_is_the_request_s_last_and_never_its_own_matcher_s() -> None:
    """What must come is made whole before it is cut, so that a short grammar may take most of a second."""
    now, asked = [0], list[int]()

    class Slow(MadeUpMatcher):
        """Each look takes 6 ms, and leaves it at its limits."""

        looked = False

        def deep_copy(self) -> MadeUpMatcher:
            return Slow(self._grammar, self._said)

        def compute_ff_tokens(self) -> list[int]:
            self.looked = True
            asked.append(len(self._said))
            now[0] += 6_000_000
            return super().compute_ff_tokens()

        def is_error(self) -> bool:
            return self.looked

    kept, tokens = Kept(drafts=3, spent=lambda: now[0]), said("one 9", 9)
    kept.rows.open(1, "one 9")
    kept.compile("one 9", Slow("one 9"))
    kept.rows.place(1, 0, 3, 10)
    for at in range(3):
        kept.take(1, tokens[at])
        assert kept.allowed(0, 3, 11 + at) == [tokens[at + 1]] and not kept.rows.lost
    assert asked == [0] and kept.memory.read_forced(0, 3, 13, tokens[2], 9).size == 0
