"""How a router's scores select the experts of a token and their routing weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

Scoring: TypeAlias = Literal["softmax", "logistic"]
LEAST_SUM: Final = 1e-20  # added to the divisor of logistic routing weights, so that zeros stay zeros


@dataclass(frozen=True, slots=True)
class Choice:
    """The routing rule of a layer. Each expert has a value in float32: the softmax over all scores, or the logistic
    function of the expert's score. A token is sent to the `chosen` experts with the highest values; among equal values
    the lower expert number wins.

    correction: added to the values for the choice only, not to the routing weights; None: no correction. groups: number
    of equally large groups of consecutive experts. Only experts in the `chosen_groups` best groups can be chosen; a
    group's rank is the sum of its two highest corrected values, and the lower group number wins a tie. Without
    correction and groups, scores are compared instead of values, since the softmax keeps their order.

    The routing weight of a chosen expert is its value, divided by the sum of the chosen experts' values if
    `renormalised`, times `scale`. A NaN among a token's scores makes all of its routing weights NaN.

    Source: DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", section 2.1.2, for the logistic function, the correction
    and the groups.
    """

    chosen: int
    renormalised: bool
    scoring: Scoring = "softmax"
    correction: torch.Tensor | None = None  # float32 [experts]
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    @property
    def limits_groups(self) -> bool:
        return self.chosen_groups < self.groups

    @property
    def by_score(self) -> bool:
        """Return whether the highest scores choose, whatever their values are."""
        return self.scoring == "softmax" and self.correction is None and not self.limits_groups
