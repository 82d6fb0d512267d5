"""How long launches with drafts take, beside those without: what a choice of the number of drafts reckons with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """query_tokens, step_ms: how long a launch of so many query tokens takes on a GPU, ascending; between two it is
    interpolated, and beyond the last it takes as long as that. The other times are in launches without drafts, where
    each row has as many places as it has drafts (the CPU's). runs: of a launch with any drafts. place: of a drafter's
    step for a place of the run, over the step that its weights let expect. token: of a query token.

    least_price, row_price, most_price: what a draft costs that is looked up, in tokens that the launch would bring
    without it: the first, and so much for each row, at most the last.
    """

    query_tokens: tuple[int, ...]
    step_ms: tuple[float, ...]
    runs: float
    place: float
    token: float
    least_price: float
    row_price: float
    most_price: float
