"""How a router's scores become the experts of a token and their shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

Scoring: TypeAlias = Literal["softmax", "logistic"]
LEAST_SUM: Final = 1e-20  # is added to what shares by the logistic function are divided by, so that zeros stay zeros


@dataclass(frozen=True, slots=True)
class Choice:
    """A token's scores give each expert a value in float32: the softmax over all experts, or the logistic function of
    its own score. A token is sent to the `chosen` experts of the highest values, of equal ones to those of the lowest
    numbers.

    correction: is added to the values by which experts are chosen, and to no share; None: nothing is. groups: experts
    lie in as many groups alike, by their numbers, and only those of the `chosen_groups` best groups are chosen from:
    a group counts by the sum of its two highest values, corrected, of equal ones the lower number. Where neither is
    done, the highest softmax belongs to the highest score, so scores are compared.

    A chosen expert's share is its value, divided by the sum of those of all that are chosen if `renormalised`, times
    `scale`. A score that is no number makes all shares of its token so.

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
        """Whether the highest scores choose, whatever their values are."""
        return self.scoring == "softmax" and self.correction is None and not self.limits_groups
