"""The costs that validate a simulated replica are the measured replica's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from benchmarks.fleet.validate import Replica, gap_that_ends, measured_costs, simulated_beside_rows
from runahead.service.commands.bench.calls import Outcome
from runahead.service.commands.bench.workload import Planned

DECODE_MS = {1: 3.0, 4: 4.0, 16: 8.0}
LEAST_MS, TOKEN_MS = 5.0, 0.125


class Formula(Replica):
    """Launches take what a formula says."""

    def __init__(self, first_ms: float) -> None:
        self._first_ms = first_ms

    async def decode_ms(self, rows: int) -> float:
        return DECODE_MS[rows]

    async def beside_rows(self, tokens: int) -> tuple[float, float]:
        return LEAST_MS + TOKEN_MS * (tokens + 4), self._first_ms


class Steady(Replica):
    """A token of each row every 4 ms, and 20 ms for a launch with a prompt, whose first token ends it."""

    def __init__(self) -> None:
        with grpc.insecure_channel("127.0.0.1:1") as channel:
            super().__init__(channel, 4096)  # type: ignore[arg-type]

    async def run(self, requests: Sequence[Planned]) -> tuple[list[Outcome], float]:
        prompts = [each for each in requests if each.max_tokens == 1]
        rows = [each for each in requests if each.max_tokens > 1]
        assert len({each.prompt[:128] for each in prompts}) == 1, "they share a prefix"
        assert len({each.prompt for each in prompts}) == len(prompts)
        at, gaps, left = 0.004, list[float](), list(prompts)
        found = list[Outcome]()
        for _ in range(rows[0].max_tokens - 1):
            gap = 0.004
            if left and at >= left[0].due_s:
                gap = 0.020
                found.append(Outcome(1, first_token_s=at + gap - left.pop(0).due_s))
            gaps.append(gap)
            at += gap
        assert not left, "rows decode beside every prompt"
        return [*(Outcome(each.max_tokens, first_token_s=0.004, gaps_s=gaps) for each in rows), *found], at


def test_the_gap_of_a_launch_is_found_by_the_first_token_that_it_made() -> None:
    assert gap_that_ends([0.0, 1.0, 4.0, 5.0], 3.8) == 3.0
    launch_ms, first_ms = asyncio.run(Steady().beside_rows(16))
    assert launch_ms == pytest.approx(20.0)
    assert 20.0 <= first_ms < 24.0


def test_tokens_that_are_read_together_took_as_long() -> None:
    class Bursts(Steady):
        async def run(self, requests: Sequence[Planned]) -> tuple[list[Outcome], float]:
            return [Outcome(5, first_token_s=0.01, end_s=0.026, tokens=5, gaps_s=[0.0, 0.0, 0.0, 0.016])], 0.026

    assert asyncio.run(Bursts().decode_ms(1)) == pytest.approx(4.0)


def test_costs_are_those_of_the_measured_replica() -> None:
    costs = asyncio.run(measured_costs(Formula(first_ms=60.0), 16_000))
    assert costs.prompt_ms == pytest.approx((LEAST_MS, TOKEN_MS))
    assert costs.decode_table()[16] == DECODE_MS[16]
    assert costs.overhead_ms > 20.0
    assert simulated_beside_rows(costs) == pytest.approx(60.0, abs=0.5), "with the overhead, to 1 % of a launch"


def test_a_replica_without_overhead_has_none() -> None:
    assert asyncio.run(measured_costs(Formula(first_ms=1.0), 16_000)).overhead_ms == 0.0
