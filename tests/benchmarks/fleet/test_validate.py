"""The costs that validate a simulated replica are the measured replica's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import pytest

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.validate import Replica, gap_that_ends, measured_costs, simulated_beside_rows
from runahead.service.commands.bench.calls import Outcome, Planned

DECODE_S = {1: 0.003, 4: 0.004, 16: 0.008}
LEAST_S, TOKEN_S, OVERHEAD_S, PREFIX = 0.005, 0.000125, 0.004, 128


class Formula(Replica):
    """Launches take what a formula says; each is planned when the last but one starts.

    slowed: the factor of a launch's time, from the seconds since the start and the prompt tokens.
    """

    def __init__(self, slowed: Callable[[float, int], float] = lambda at, tokens: 1.0) -> None:
        with grpc.insecure_channel("127.0.0.1:1") as channel:
            super().__init__(channel, 4096)  # type: ignore[arg-type]
        self._slowed = slowed
        self.now = 0.0

    async def run(self, requests: Sequence[Planned]) -> tuple[list[Outcome], float]:
        waiting = [each for each in requests if each.max_tokens == 1]
        rows = [each for each in requests if each.max_tokens > 1]
        assert len({each.prompt for each in requests}) == len(requests)
        assert len({each.prompt[:PREFIX] for each in waiting}) <= 1, "they share a prefix"
        first_s = starts = 0.004
        begun, gaps, found, prompts = [first_s] * 3, list[float](), list[Outcome](), waiting[:]
        for _ in range(rows[0].max_tokens - 1):
            tokens, took = 0, DECODE_S[len(rows)]
            if prompts and prompts[0].due_s < begun[-3]:
                tokens = len(prompts[0].prompt) - PREFIX
                took = LEAST_S + TOKEN_S * (tokens + len(rows))
            took *= self._slowed(self.now + starts, tokens)
            starts += took
            begun.append(starts)
            gaps.append(took)
            if tokens:
                found.append(Outcome(1, first_token_s=starts + OVERHEAD_S - prompts.pop(0).due_s))
        assert not prompts, "rows decode beside every prompt"
        self.now += starts
        row = Outcome(
            1, first_token_s=first_s + OVERHEAD_S, end_s=starts + OVERHEAD_S, tokens=1 + len(gaps), gaps_s=gaps
        )
        return [*[row] * len(rows), *found], starts


def assert_is_formula(costs: Costs) -> None:
    assert [rows for rows, _ in costs.decode_ms] == list(DECODE_S)
    assert [ms for _, ms in costs.decode_ms] == pytest.approx([1e3 * each for each in DECODE_S.values()])
    assert costs.prompt_ms == pytest.approx((1e3 * LEAST_S, 1e3 * TOKEN_S))
    assert costs.overhead_ms == pytest.approx(1e3 * OVERHEAD_S, abs=1.0), "arrivals fall anywhere in a launch"


def test_the_gap_of_a_launch_is_found_by_the_first_token_that_it_made() -> None:
    assert gap_that_ends([0.0, 1.0, 4.0, 5.0], 3.8) == 3.0
    for tokens, launch_ms, first_ms in asyncio.run(Formula().beside_rows()):
        assert launch_ms == pytest.approx(1e3 * (LEAST_S + TOKEN_S * (tokens + 4)))
        assert launch_ms + 1e3 * OVERHEAD_S <= first_ms < launch_ms + 1e3 * (OVERHEAD_S + 3 * DECODE_S[4])


def test_tokens_that_are_read_together_took_as_long() -> None:
    class Bursts(Replica):
        async def run(self, requests: Sequence[Planned]) -> tuple[list[Outcome], float]:
            return [Outcome(5, first_token_s=0.01, end_s=0.026, tokens=5, gaps_s=[0.0, 0.0, 0.0, 0.016])], 0.026

    with grpc.insecure_channel("127.0.0.1:1") as channel:
        replica = Bursts(channel, 4096)  # type: ignore[arg-type]
    assert asyncio.run(replica.decode_ms(1)) == pytest.approx(4.0)


def test_costs_are_those_of_the_measured_replica() -> None:
    replica = Formula()
    costs = asyncio.run(measured_costs(replica, 16_000))
    assert_is_formula(costs)
    tokens, _, first_ms = asyncio.run(replica.beside_rows())[-1]
    assert simulated_beside_rows(costs, tokens) == pytest.approx(first_ms, abs=4.0), "to a decode launch"


@pytest.mark.parametrize("began_s", range(0, 28, 2))
def test_seconds_of_noise_change_no_cost(began_s: int) -> None:
    replica = Formula(lambda at, tokens: 2.5 if began_s <= at < began_s + 6 else 1.0)
    costs = asyncio.run(measured_costs(replica, 16_000))
    assert replica.now > began_s, "the noise came while it was measured"
    assert_is_formula(costs)


def test_costs_that_contradict_themselves_are_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    replica = Formula(lambda at, tokens: 5.0 if tokens > 100 and at < 20.0 else 1.0)
    costs = asyncio.run(measured_costs(replica, 16_000))
    assert_is_formula(costs)
    refused, *_, taken = capsys.readouterr().out.splitlines()
    assert "5 rounds" in refused and "a prompt's time is not above 0" in refused
    assert taken.startswith("6 rounds") or taken.startswith("7 rounds")


def test_a_machine_that_stays_busy_is_refused_after_ten_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    replica = Formula(lambda at, tokens: 5.0 if tokens > 100 else 1.0)
    with pytest.raises(RuntimeError, match=r"after 10 rounds a prompt.s time .* busy with something else"):
        asyncio.run(measured_costs(replica, 16_000))
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_an_overhead_is_less_than_two_decode_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.OVERHEAD_S", 0.008)
    with pytest.raises(RuntimeError, match=r"the overhead is above 6\.00 ms, 2 decode launches"):
        asyncio.run(measured_costs(Formula(), 16_000))


def test_decode_launches_may_take_equally_long_but_not_less_with_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODE_S, 16, 0.0037)
    assert asyncio.run(measured_costs(Formula(), 16_000)).decode_table()[16] == pytest.approx(3.7)
    monkeypatch.setitem(DECODE_S, 16, 0.0035)
    with pytest.raises(RuntimeError, match="of more rows takes less time"):
        asyncio.run(measured_costs(Formula(), 16_000))


def test_a_replica_without_overhead_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.OVERHEAD_S", -0.02)
    assert asyncio.run(measured_costs(Formula(), 16_000)).overhead_ms == 0.0
