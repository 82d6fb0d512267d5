"""Chooses the captured graph of each launch: the numbers of rows and of query tokens that graphs are captured for. No
torch."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from runahead.cuda_graphs.device import Form, LaunchShape

_SMALL_BUCKETS: Final = (1, 2, 4, 8)
_BUCKET_STEP: Final = 8  # between small buckets and _WIDE_FROM rows
_WIDE_FROM: Final = 64
_WIDE_STEP: Final = 32
_WIDEST_FROM: Final = 256
_WIDEST_STEP: Final = 64
MOST_MIXED_TOKENS: Final = 512  # query tokens of a mixed launch that is one graph
_MIXED_STEP: Final = 32
_MIXED_TOKENS: Final = range(_MIXED_STEP, MOST_MIXED_TOKENS + 1, _MIXED_STEP)
_MIXED_ROWS: Final = (8, 64)
_FORWARD_PROMPT_TOKENS: Final = 2048  # of a launch whose apply and F are a graph, beside all rows
_FORWARD_STEP: Final = 64
_FORWARD_TOKENS: Final = range(MOST_MIXED_TOKENS + _FORWARD_STEP, _FORWARD_PROMPT_TOKENS + 1024 + 1, _FORWARD_STEP)
_FORWARD_ROWS: Final = (1, 64)  # a single chunk may have special kernels
# Reasons why a launch is not one graph: S is one, and apply and F are another or run eagerly.
MIXED: Final = "mixed"  # F has more query tokens of prompts than any graph of a whole launch
CLOSING: Final = "closing"  # no row is left for F
DRAFTS: Final = "drafts"  # F has another number of drafts than S verifies
PROMPT_LOGPROBS: Final = "prompt_logprobs"  # only because of prompt log-probabilities

_CLOSING_CALLS: Final = 5  # S, apply and the marks
_TOKENS_A_CALL: Final = 2  # prompt log-probabilities: fewer than 16 calls for 32 tokens


class Piece(enum.StrEnum):
    """The part of a launch that a graph captures."""

    LAUNCH = "launch"  # S, apply and F of decode rows
    MIXED = "mixed"  # S, apply and F of decode rows and prompt chunks together
    SAMPLE = "sample"  # S alone, for launches without a whole graph
    FORWARD = "forward"  # apply and F, if S verifies another number of drafts, and of large mixed launches


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Identifies a captured graph.

    rows: the bucket of sample rows and of F's rows. drafts: of a row, in S and in F. tokens: the bucket of a mixed
    launch's query tokens; 0: not mixed. masked: S reads masks. forced: F has no guesses. A FORWARD has the form PLAIN.
    """

    piece: Piece
    rows: int
    form: Form
    drafts: int = 0
    tokens: int = 0
    masked: bool = False
    forced: bool = False

    @property
    def shape(self) -> LaunchShape:
        """The launch that is captured, with both buckets full. Its number means nothing."""
        rows, drafts, mixed = self.rows, self.drafts, self.tokens > 0
        tokens = self.tokens if mixed else rows * (1 + drafts)
        return LaunchShape(
            0, rows, self.form, rows, tokens, not mixed, drafts=drafts, sample_drafts=drafts, masked=self.masked,
            forced=self.forced,
        )  # fmt: skip


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """Return the row counts of captured decode launches, ascending; the last is `max_rows`."""
    small = [*_SMALL_BUCKETS, *range(16, _WIDE_FROM, _BUCKET_STEP), *range(_WIDE_FROM, _WIDEST_FROM, _WIDE_STEP)]
    return _up_to(max_rows, [*small, *range(_WIDEST_FROM, max_rows, _WIDEST_STEP)])


def most_forward_tokens(max_rows: int) -> int:
    """Return the most query tokens of a mixed launch whose apply and F are a graph."""
    return _FORWARD_PROMPT_TOKENS + max(_WIDEST_FROM, max_rows)


def _up_to(most: int, steps: Iterable[int]) -> tuple[int, ...]:
    return (*(step for step in steps if step < most), most)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Bucket sizes, all ascending.

    rows: of decode launches, and of S. mixed_rows, mixed_tokens: of launches with prompt chunks that are one graph.
    forward_rows, forward_tokens: of larger ones, whose apply and F are a graph. pieces_tokens: padded query tokens of
    apply and F without a graph. draft_rows: of decode launches that verify drafts; draft_forms: their numbers of
    drafts, above 0. masked: launches whose S reads masks are captured, too. forced_rows: of launches with the most
    drafts and no guesses, which are separate graphs without a drafter's steps, where S reads masks or is a separate
    graph.
    """

    rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    pieces_tokens: tuple[int, ...]
    forward_rows: tuple[int, ...] = ()
    forward_tokens: tuple[int, ...] = ()
    draft_forms: tuple[int, ...] = ()
    draft_rows: tuple[int, ...] = ()
    masked: bool = False
    forced_rows: tuple[int, ...] = ()

    @classmethod
    def up_to(
        cls, max_rows: int, mixed_tokens: int, draft_forms: Sequence[int] = (), draft_rows: int = 0,
        masked: bool = False, forced_rows: int = 0, forward_tokens: int = 0,
    ) -> Buckets:  # fmt: skip
        """Return the buckets for these limits.

        max_rows: of a launch. mixed_tokens: query tokens of the largest mixed launch. draft_rows: of the largest launch
        with drafts. masked: some rows may have a grammar. forced_rows: of the largest launch without guesses that has a
        separate graph; 0: none has. forward_tokens: most query tokens of a mixed launch whose apply and F are a graph.
        """
        rows, in_graphs = buckets_for(max_rows), _up_to(min(mixed_tokens, MOST_MIXED_TOKENS), _MIXED_TOKENS)
        most = min(mixed_tokens, forward_tokens // _FORWARD_STEP * _FORWARD_STEP, _FORWARD_TOKENS[-1])
        return cls(
            rows,
            _up_to(max_rows, _MIXED_ROWS),
            in_graphs,
            _up_to(mixed_tokens, (*in_graphs, *range(MOST_MIXED_TOKENS + _FORWARD_STEP, mixed_tokens, _FORWARD_STEP))),
            _up_to(max_rows, _FORWARD_ROWS),
            _up_to(most, _FORWARD_TOKENS) if most > MOST_MIXED_TOKENS else (),
            tuple(draft_forms),
            tuple(bucket for bucket in rows if bucket <= draft_rows),
            masked,
            tuple(bucket for bucket in rows if bucket <= min(draft_rows, forced_rows)),
        )

    def every_key(self) -> list[GraphKey]:
        """Return every graph, the largest first."""
        alone = (Piece.LAUNCH, Piece.SAMPLE)
        forms = [(form, False) for form in Form] + [(Form.FULL, True)] * self.masked
        keys = [
            GraphKey(piece, rows, form, masked=masked)
            for rows in self.rows for form, masked in forms for piece in alone
        ]  # fmt: skip
        keys += [
            GraphKey(Piece.MIXED, rows, form, tokens=tokens, masked=masked)
            for rows in self.mixed_rows for tokens in self.mixed_tokens for form, masked in forms
        ]  # fmt: skip
        keys += [
            GraphKey(Piece.FORWARD, rows, Form.PLAIN, tokens=tokens)
            for rows in self.forward_rows for tokens in self.forward_tokens
        ]  # fmt: skip
        for rows in self.draft_rows if self.draft_forms else ():
            for drafts in self.draft_forms:
                keys += [
                    GraphKey(piece, rows, form, drafts, masked=masked) for form, masked in forms for piece in alone
                ]
            keys += [GraphKey(Piece.FORWARD, rows, Form.PLAIN, drafts) for drafts in (0, *self.draft_forms)]
        for rows in self.forced_rows:
            most = max(self.draft_forms)
            keys.append(GraphKey(Piece.LAUNCH, rows, Form.FULL, most, masked=True, forced=True))
            keys.append(GraphKey(Piece.FORWARD, rows, Form.PLAIN, most, forced=True))
        return sorted(keys, key=lambda key: (-key.shape.tokens, -key.rows))

    def largest_keys(self) -> list[GraphKey]:
        """Return the largest graph of each piece, number of drafts, with and without masks, largest first. The others
        fit into their memory, apart from each graph's fixed size."""
        largest: dict[tuple[Piece, int, bool], GraphKey] = {}
        for key in self.every_key():
            if key.form is Form.FULL or key.piece is Piece.FORWARD:
                largest.setdefault((key.piece, key.drafts, key.masked), key)
        return list(largest.values())

    def holds(self, shape: LaunchShape) -> bool:
        """Return whether some graph of a whole launch has enough query tokens."""
        return shape.is_decode or shape.tokens <= self.mixed_tokens[-1]

    def launch_key(self, shape: LaunchShape) -> GraphKey | None:
        """Return the graph of the whole launch. None if it leaves prompt log-probabilities, has no rows, has more query
        tokens than any graph, or verifies another number of drafts in S than it has in F."""
        if shape.prompt_logprobs or shape.is_closing or shape.drafts != shape.sample_drafts or not self.holds(shape):
            return None
        rows = max(shape.rows, shape.sample_rows)
        if shape.is_decode:
            bucket, forced = _at_least(rows, self.rows), shape.masked and self._leaves_steps_out(shape, rows)
            return GraphKey(Piece.LAUNCH, bucket, shape.form, shape.drafts, masked=shape.masked, forced=forced)
        tokens = _at_least(shape.tokens, self.mixed_tokens)
        bucket = _at_least(rows, self.mixed_rows)
        return GraphKey(Piece.MIXED, bucket, shape.form, tokens=tokens, masked=shape.masked)

    def why_none(self, shape: LaunchShape) -> str:
        """Return why a launch has no `launch_key`."""
        if shape.is_closing:
            return CLOSING
        if not self.holds(shape):
            return MIXED
        return PROMPT_LOGPROBS if shape.prompt_logprobs else DRAFTS

    def calls(self, shape: LaunchShape, in_pieces: int) -> int:
        """Return the most calls that enqueue the launch. in_pieces: calls of a mixed launch without a graph."""
        if self.launch_key(shape) is not None:
            return 1
        if shape.is_closing:
            return _CLOSING_CALLS
        if self.forward_key(shape) is not None:
            return 2
        return in_pieces + (self.padded(shape).tokens // _TOKENS_A_CALL if shape.prompt_logprobs else 0)

    def padded(self, shape: LaunchShape) -> LaunchShape:
        """Return the launch with apply and F padded, as in a graph, to row and token counts that were warmed up. The
        vendor's library chooses a kernel by both, and may wait for the device when it first uses one."""
        if shape.is_closing:
            return shape
        rows = _at_least(shape.rows, self.rows)
        tokens = rows * (1 + shape.drafts) if shape.is_decode else _at_least(shape.tokens, self.pieces_tokens)
        return shape._replace(rows=rows, tokens=tokens)

    def sample_key(self, shape: LaunchShape) -> GraphKey:
        """Return the graph of the launch's S alone."""
        rows = _at_least(shape.sample_rows, self.rows)
        return GraphKey(Piece.SAMPLE, rows, shape.form, shape.sample_drafts, masked=shape.masked)

    def forward_key(self, shape: LaunchShape) -> GraphKey | None:
        """Return the graph of apply and F of a launch without a whole graph, or None."""
        if shape.prompt_logprobs or shape.is_closing:
            return None
        if not shape.is_decode:
            if self.holds(shape) or shape.tokens > max(self.forward_tokens, default=0):
                return None
            rows = _at_least(shape.rows, self.forward_rows)
            return GraphKey(Piece.FORWARD, rows, Form.PLAIN, tokens=_at_least(shape.tokens, self.forward_tokens))
        if shape.rows > max(self.draft_rows, default=0):
            return None
        forced = self._leaves_steps_out(shape, shape.rows)
        return GraphKey(Piece.FORWARD, _at_least(shape.rows, self.draft_rows), Form.PLAIN, shape.drafts, forced=forced)

    def _leaves_steps_out(self, shape: LaunchShape, rows: int) -> bool:
        """Return whether the launch has no guesses and a separate graph for that. rows: of its graph, at least."""
        return shape.forced and rows <= max(self.forced_rows, default=0) and shape.drafts == max(self.draft_forms)


def _at_least(count: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest bucket of at least `count`."""
    return buckets[bisect.bisect_left(buckets, count)]
