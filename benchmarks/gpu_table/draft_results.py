"""What the parts about drafts leave in their files: launches that verify them."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

# What a model's launch that verifies drafts is held against: of a model with experts it reads more of them.
ModelKind: TypeAlias = Literal["dense", "states", "experts"]


class VerifiedLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A launch that verifies `drafts` of each row, all of them right, beside a plain one of as many rows: bare graphs.

    context: tokens that a row holds in the middle of what was measured, the same of both. experts_*: that the launch's
    query tokens name in a layer, each counted once, the mean over layers and launches; 0 in a model without. floor_*:
    of the bytes of these launches, with these experts. drafter_us: of what proposes the drafts and makes the launch's
    query tokens of them. None: not measured; skipped: why.
    """

    shape: str
    kind: ModelKind
    rows: int
    drafts: int
    exact: bool
    context: float
    floor_plain_ms: float | None = None
    floor_verified_ms: float | None = None
    experts_plain: float | None = None
    experts_verified: float | None = None
    plain_ms: float | None = None
    verified_ms: float | None = None
    runs_ms: tuple[tuple[float, float], ...] = ()  # plain and verified, of each repetition
    nodes: tuple[int, int] | None = None  # of the graphs, plain and verified; None where there are none
    drafter_us: float | None = None
    skipped: str = ""
