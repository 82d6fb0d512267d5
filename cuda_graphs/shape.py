"""What a launch looks like from outside: how many rows, how many tokens, which form of sampling."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Form(enum.StrEnum):
    """What the sample rows of a launch ask of the sampler."""

    PLAIN = "plain"  # greedy and temperature
    FULL = "full"  # filters, penalties, bias, allowed tokens, masked stop ids, log-probabilities


class LaunchShape(NamedTuple):
    """The host's description of one launch, S(number) -> apply(number) -> F(number).

    number: the launch's place in the chain, without gaps; 64 bits hold it. The first is 1, except in tests.
    sample_rows: rows that S(number) looks at, all rows of plan number - 1 (0: there is nothing to sample).
    form: what those sample rows need.
    rows: rows of F(number); 0 makes the launch a closing one, S and copy-out alone.
    tokens: query tokens of F(number), as if each row that decodes had `drafts`.
    is_decode: every row of F(number) has as many query tokens as one that decodes, 1 + drafts; not of a closing launch.
    prompt_logprobs: a chunk of F leaves log-probabilities of its prompt. False: the launch does none of the work for
    them.
    drafts: query tokens of F(number) that are guessed, of each row that decodes; 0 where none does.
    sample_drafts: the same of F(number - 1), whose logits S(number) looks at, leaving 1 + sample_drafts cells a row.
    masked: S(number), in the full form, looks for masks of rows with a grammar.
    forced: nobody guesses any of `drafts`, which are above 0: grammars alone may say them.
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
