"""The tables about drafts as Markdown: launches that verify them, and steps of what makes them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_table.draft_results import VerifiedLaunch
from benchmarks.gpu_table.markdown import NONE, at_most, number, ratio, table
from benchmarks.gpu_table.published import VERIFIED_GOALS


def verified_table(launches: Sequence[VerifiedLaunch]) -> list[str]:
    rows = []
    for one in launches:
        of_plain = ratio(one.verified_ms, one.plain_ms)
        plain_floors, floors = ratio(one.plain_ms, one.floor_plain_ms), ratio(one.verified_ms, one.floor_verified_ms)
        of_floors = ratio(floors, plain_floors)
        goal = VERIFIED_GOALS[one.kind].get(one.rows)
        rows.append([
            one.shape, str(one.rows), str(one.drafts), "exact" if one.exact else "fastest",
            number(one.experts_plain, 1), number(one.floor_plain_ms), number(one.plain_ms, 3), number(plain_floors, 3),
            number(one.experts_verified, 1), number(one.floor_verified_ms), number(one.verified_ms, 3),
            number(floors, 3), number(of_plain, 3), number(of_floors, 3), number(goal),
            at_most(of_floors if one.kind == "experts" else of_plain, goal), number(one.drafter_us, 1),
            NONE if one.nodes is None else f"{one.nodes[0]} and {one.nodes[1]}",
        ])  # fmt: skip
    head = ["shape", "batch", "drafts", "kernels", "experts a layer", "floor", "plain", "÷ floor",
            "experts a layer", "floor", "verifies", "÷ floor", "verifies ÷ plain", "÷ floor over ÷ floor", "goal", "",
            "drafter µs", "nodes"]  # fmt: skip
    says = "The goal is for verifies ÷ plain; with experts, for the one ÷ floor over the other."
    left_out = [f"- no figure for {one.shape}, batch {one.rows}: {one.skipped}" for one in launches if one.skipped]
    title = "**Milliseconds of a launch that verifies drafts, all of them right, beside a plain one: bare graphs**"
    return [title, "", says, "", *table(head, rows), *left_out] if rows else []
