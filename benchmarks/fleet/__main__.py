"""A simulation of replicas behind a router: what they do with a load, and how many a load needs.

`run` prints figures of one fleet, `need` the fewest replicas of which a share of requests is good, `validate` compares
one simulated replica with a real one on this machine's CPU. Times of launches are measured ones (costs.json).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fleet import validate
from benchmarks.fleet.costs import Costs, read
from benchmarks.fleet.routing import POLICIES
from benchmarks.fleet.simulation import KINDS, Change, Fleet, simulate
from benchmarks.fleet.traffic import ARRIVALS, Traffic


def fewest(fleet: Fleet, costs: Costs, traffic: Traffic, share: float, most: int) -> int:
    """The fewest replicas of which that share of requests is good. Raises ValueError if `most` are too few."""
    least, enough = 0, 1
    while simulate(replace(fleet, replicas=enough), costs, traffic).good_share < share:
        least, enough = enough, 2 * enough
        if least >= most:
            raise ValueError(f"{most} replicas are too few: see what `run` prints of them")
    while enough - least > 1:
        middle = (least + enough) // 2
        if simulate(replace(fleet, replicas=middle), costs, traffic).good_share >= share:
            enough = middle
        else:
            least = middle
    return enough


def _change(text: str) -> Change:
    """`lose:2@60`: two are lost after 60 s."""
    kind, _, rest = text.partition(":")
    count, _, at_s = rest.partition("@")
    if kind not in KINDS or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND:COUNT@SECONDS, with KIND one of {', '.join(KINDS)}")
    return Change(float(at_s), kind, int(count))  # type: ignore[arg-type]


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("what", choices=("run", "need", "validate"))
    parser.add_argument("--costs", default="8B-H200", help="whose times of launches, in costs.json (%(default)s)")
    parser.add_argument(
        "--replicas", type=int, default=10, help="for `need` the most it tries, 1 to 1,000 (%(default)s)"
    )
    parser.add_argument("--policy", nargs="+", choices=tuple(POLICIES), default=["least-waiting"])
    parser.add_argument("--rate", type=_positive, default=200.0, help="requests a second, on average (%(default)s)")
    parser.add_argument("--seconds", type=_positive, default=60.0, help="of traffic (%(default)s)")
    parser.add_argument("--arrivals", choices=ARRIVALS, default="poisson")
    parser.add_argument("--day-s", type=_positive, default=3600.0, help="a day of diurnal traffic (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tenants", type=int, default=0, help="that each share a prefix; 0: nothing is shared")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of how often each tenant asks (%(default)s)")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that a tenant's requests share (%(default)s)")
    parser.add_argument("--prompt", type=int, default=400, help="median tokens of the rest of a prompt (%(default)s)")
    parser.add_argument("--answer", type=int, default=125, help="median tokens of an answer (%(default)s)")
    parser.add_argument(
        "--report-s", type=_positive, default=0.1, help="between two reports of a replica (%(default)s)"
    )
    parser.add_argument("--kv-delay-s", type=float, default=0.1, help="of KV events (%(default)s)")
    parser.add_argument("--cold-start-s", type=float, default=60.0, help="of an added replica (%(default)s)")
    parser.add_argument("--change", type=_change, nargs="*", default=[], help="KIND:COUNT@SECONDS: lose, drain or add")
    parser.add_argument("--good-first-token-ms", type=_positive, default=200.0)
    parser.add_argument("--good-token-ms", type=_positive, default=25.0)
    parser.add_argument("--good-share", type=float, default=0.99, help="of requests, for `need` (%(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where `validate` finds more than its bound."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.what == "validate":
        return validate.main(asked.seconds, asked.seed)
    if not 1 <= asked.replicas <= 1000:
        parser.error(f"--replicas has to be 1 to 1,000, not {asked.replicas}")
    traffic = Traffic(
        asked.rate, asked.seconds, asked.arrivals, asked.seed, asked.day_s,
        asked.tenants, asked.zipf, asked.prefix, asked.prompt, asked.answer,
    )  # fmt: skip
    try:
        costs = read(asked.costs)
        for policy in asked.policy:
            fleet = Fleet(
                asked.replicas, policy, asked.report_s, asked.kv_delay_s, asked.cold_start_s,
                tuple(asked.change), asked.good_first_token_ms, asked.good_token_ms,
            )  # fmt: skip
            if asked.what == "need":
                fleet = replace(fleet, replicas=fewest(fleet, costs, traffic, asked.good_share, asked.replicas))
            begun = time.process_time()
            found = simulate(fleet, costs, traffic).numbers()
            took = time.process_time() - begun
            print(f"{policy}, {fleet.replicas} replicas, {asked.rate:g} requests/s, simulated in {took:.1f} s")
            print("\n".join(f"  {name:20} {number:12,.2f}" for name, number in found.items()), flush=True)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
