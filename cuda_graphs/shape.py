"""A launch's shape: rows, tokens and sampler form."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Form(enum.StrEnum):
    """The sampler form that a launch's sample rows need."""

    PLAIN = "plain"  # greedy and temperature
    FULL = "full"  # filters, penalties, bias, allowed tokens, masked stop ids, log-probabilities


class LaunchShape(NamedTuple):
    """The host's description of one launch, S(number) -> apply(number) -> F(number).

    number: the launch's number in the chain, without gaps, in 64 bits. The first is 1, except in tests. sample_rows:
    rows that S(number) reads, all rows of plan number - 1 (0: nothing to sample). form: of those sample rows. rows:
    rows of F(number); 0 makes the launch a closing one, S and copy-out alone. tokens: query tokens of F(number), as if
    each decoding row had `drafts`. is_decode: every row of F(number) has the query tokens of a decoding row, 1 +
    drafts; not in a closing launch. prompt_logprobs: a chunk of F leaves log-probabilities of its prompt. False: the
    launch does no work for them. drafts: drafts of each decoding row in F(number); 0 without any. sample_drafts: the
    same in F(number - 1), whose logits S(number) samples, leaving 1 + sample_drafts cells a row. masked: S(number), in
    the full form, reads masks of rows with a grammar. forced: none of `drafts`, which are above 0, is a guess: only
    grammars may force them.
    """

    number: int
    sample_rows: int
    form: Form
    rows: int
    tokens: int
    is_decode: bool
    prompt_logprobs: bool = False
    drafts: int = 0
    sample_drafts: int = 0
    masked: bool = False
    forced: bool = False

    @property
    def is_closing(self) -> bool:
        return self.rows == 0
