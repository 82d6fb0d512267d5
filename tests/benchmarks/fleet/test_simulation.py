"""Replicas behind a router: traffic from a seed, policies, and replicas that come and go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fleet.__main__ import fewest, main
from benchmarks.fleet.costs import read
from benchmarks.fleet.figures import Figures, Histogram
from benchmarks.fleet.simulation import Change, Fleet, simulate
from benchmarks.fleet.traffic import ARRIVALS, Traffic
from benchmarks.fleet.validate import compare, prompts, trace

H200 = read("8B-H200")
TRAFFIC = Traffic(rate=80.0, seconds=20.0, tenants=50, prefix=512)
FLEET = Fleet(4)


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_traffic_is_the_same_for_the_same_seed_and_has_the_rate_that_is_asked_for(arrivals: str) -> None:
    traffic = Traffic(50.0, 400.0, arrivals, seed=3, day_s=400.0, tenants=10, prefix=64)
    found = list(traffic.requests())
    assert found == list(traffic.requests()) != list(replace(traffic, seed=4).requests())
    assert len(found) == pytest.approx(50 * 400, rel=0.05)
    assert [request.arrived for request in found] == sorted(request.arrived for request in found)
    per_tenant = np.bincount([request.tenant for request in found])
    assert per_tenant[0] == pytest.approx(2 * per_tenant[1], rel=0.1)  # Zipf
    assert np.median([request.prompt for request in found]) == pytest.approx(464, rel=0.05)


def test_bursts_and_days_have_seconds_of_other_rates() -> None:
    rates = {arrivals: Traffic(50.0, 400.0, arrivals, day_s=400.0).rates() for arrivals in ARRIVALS}
    assert set(rates["poisson"]) == {50.0}
    assert rates["bursts"].max() == pytest.approx(3 * rates["bursts"].min())
    assert rates["diurnal"].max() == pytest.approx(80, rel=0.01)
    assert all(rate.mean() == pytest.approx(50) for rate in rates.values())


@pytest.mark.parametrize("policy", ["round-robin", "least-waiting", "prefix-aware"])
def test_each_request_is_served_once_and_the_same_seed_gives_the_same_figures(policy: str) -> None:
    figures = simulate(replace(FLEET, policy=policy), H200, TRAFFIC)
    asked = list(TRAFFIC.requests())
    assert figures.finished == figures.requests == len(asked) > 1000
    assert figures.tokens == sum(request.answer for request in asked)
    assert sum(figures.first.counts.values()) == len(asked)
    assert sum(figures.gaps.counts.values()) == figures.tokens - len(asked)
    assert figures.numbers() == simulate(replace(FLEET, policy=policy), H200, TRAFFIC).numbers()


def test_a_router_that_knows_the_caches_has_more_hits_and_the_fewer_the_later_it_knows() -> None:
    traffic = replace(TRAFFIC, tenants=400)

    def hits(policy: str, delay_s: float) -> float:
        fleet = Fleet(4, policy, kv_delay_s=delay_s)
        return simulate(fleet, H200, traffic).numbers()["cached %"]

    blind, late, soon = hits("round-robin", 0.1), hits("prefix-aware", 5.0), hits("prefix-aware", 0.1)
    assert blind < late < soon


def test_the_fewest_waiting_is_better_than_turns_where_one_replica_has_the_work_of_before() -> None:
    """A replica that is added late has nothing to do yet."""
    late = (Change(5.0, "add", 2),)
    traffic = Traffic(rate=130.0, seconds=15.0)
    by_turns, by_queue = (
        simulate(Fleet(2, policy, cold_start_s=1.0, changes=late), H200, traffic)
        for policy in ("round-robin", "least-waiting")
    )
    assert by_queue.waiting < by_turns.waiting


def test_a_lost_replica_fails_what_had_tokens_and_the_rest_is_served_by_others() -> None:
    figures = simulate(replace(FLEET, changes=(Change(10.0, "lose", 1),)), H200, TRAFFIC)
    assert figures.failed > 0
    assert figures.finished + figures.failed == figures.requests
    assert figures.gpu_ms < 0.9 * simulate(FLEET, H200, TRAFFIC).gpu_ms


def test_a_lost_replica_s_waiting_requests_are_sent_again_and_keep_their_arrival() -> None:
    figures = simulate(Fleet(4, changes=(Change(10.0, "lose", 3),)), H200, replace(TRAFFIC, rate=200.0))
    assert figures.again > 0
    assert figures.finished + figures.failed == figures.requests


def test_a_drained_replica_fails_nothing_and_its_gpu_is_given_back() -> None:
    figures = simulate(replace(FLEET, changes=(Change(10.0, "drain", 2),)), H200, TRAFFIC)
    assert (figures.failed, figures.finished) == (0, figures.requests)
    assert figures.gpu_ms < 0.9 * simulate(FLEET, H200, TRAFFIC).gpu_ms


def test_an_added_replica_serves_after_its_cold_start_and_counts_before() -> None:
    def added(cold_start_s: float) -> Figures:
        fleet = Fleet(2, cold_start_s=cold_start_s, changes=(Change(5.0, "add", 2),))
        return simulate(fleet, H200, replace(TRAFFIC, rate=120.0))

    soon, late, never = added(1.0), added(8.0), added(100.0)
    assert soon.good > late.good > never.good
    assert never.gpu_ms > 2 * 20e3 + 2 * 14e3


def test_the_last_replica_can_not_go() -> None:
    with pytest.raises(ValueError, match="no replica is left after 10 s"):
        simulate(replace(FLEET, changes=(Change(10.0, "lose", 4),)), H200, TRAFFIC)


def test_prompts_that_were_not_measured_are_refused() -> None:
    with pytest.raises(ValueError, match="prompts of 20000 tokens: the costs were measured up to 8192"):
        simulate(FLEET, H200, replace(TRAFFIC, tenants=0, prompt=4000))


def test_the_fewest_replicas_that_a_load_needs_are_found() -> None:
    traffic = Traffic(rate=150.0, seconds=10.0)
    needed = fewest(FLEET, H200, traffic, 0.99, 100)
    assert simulate(replace(FLEET, replicas=needed), H200, traffic).good_share >= 0.99
    assert simulate(replace(FLEET, replicas=needed - 1), H200, traffic).good_share < 0.99


def test_quantiles_are_within_a_percent() -> None:
    times = Histogram()
    for ms in range(1, 1001):
        times.add(float(ms))
    assert [times.quantile(share) for share in (0.5, 0.99)] == pytest.approx([500, 990], rel=0.01)


def test_the_command_prints_figures_of_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "run --replicas 2 --rate 20 --seconds 5 --policy round-robin prefix-aware --change drain:1@2"
    assert main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert printed.count("first token p99 ms") == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--costs nothing", "costs.json has no costs nothing; it has 8B-H200"),
        ("--replicas 1001", "--replicas has to be 1 to 1,000, not 1001"),
        ("--report-s 0", "--report-s: 0 is not above 0"),
        ("--change stop:1@2", "'stop:1@2' is not KIND:COUNT@SECONDS, with KIND one of lose, drain, add"),
    ],
)
def test_what_can_not_be_simulated_is_refused(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", *flags.split()])
    assert said in capsys.readouterr().err


def test_the_real_replica_is_asked_for_what_the_simulated_one_is() -> None:
    traffic = trace(10.0, 20.0, seed=5)
    planned = prompts(traffic, vocab=4096)
    simulated = list(traffic.requests())
    assert [len(each.prompt) for each in planned] == [request.prompt for request in simulated]
    assert len({each.prompt[:128] for each in planned}) == len({request.tenant for request in simulated}) > 1
    assert len({each.prompt for each in planned}) == len(planned)


def test_a_figure_that_is_too_far_off_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    real = {"first token p50 ms": 10.0, "tokens/s": 100.0, "cached %": 50.0}
    rest = {"first token p99 ms": 20.0, "gap p50 ms": 5.0, "gap p99 ms": 9.0}
    assert compare({**real, **rest}, {**real, "tokens/s": 110.0, **rest, "gap p99 ms": 90.0})
    assert not compare({**real, **rest}, {**real, "cached %": 60.0, **rest})
    assert capsys.readouterr().out.count("missed") == 1
