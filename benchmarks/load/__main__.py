"""`make load`: calls that wait for no other, at 70 % and at 200 % of what the service can carry.

The service is a separate process with the bundled model. Its capacity is measured first, by callers that each make
their next call when the last one has ended. The tokens of every completion are compared with an unloaded run's.
The client takes a part of the same machine, and how late it was is printed beside what it measures.

At 200 % an operator asks too: health on its own port, figures on the control port, figures and aborts on an open
connection of the service's port.

Exits with status 1 only for what is wrong (a stream without an end or with two, other tokens), and never for a missed
speed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from contextlib import AsyncExitStack

import grpc

from benchmarks.load.arrivals import poisson
from benchmarks.load.cases import COUNT, calm_answers, cases
from benchmarks.load.phases import Client, Phase
from benchmarks.load.probes import Answers, probed
from benchmarks.load.table import Table, load_average, machine
from benchmarks.local_service import LocalService, local_service
from runahead.v1 import GenerationServiceStub, StatsRequest

CHANNELS = 8
CALLERS = 96  # of the closed loop: half more than there are rows
OPEN_STREAMS = 128  # over which the service refuses: 64 have a row, and as many wait
USUAL, OVERLOAD = 0.7, 2.0
ADMISSION_MS, REFUSAL_MS, ANSWER_MS, GOODPUT = 50.0, 20.0, 50.0, 0.9
QUIET_S = 30.0


async def measure(service: LocalService, chosen: argparse.Namespace) -> Table:
    """All phases, against a running service."""
    url = service.url
    table = Table()
    async with AsyncExitStack() as stack:
        channels = [grpc.aio.insecure_channel(url, [("runahead.channel", number)]) for number in range(CHANNELS)]
        stubs = [GenerationServiceStub(await stack.enter_async_context(channel)) for channel in channels]
        wanted = cases(chosen.cases)
        client = Client(stubs, wanted, await calm_answers(stubs[0], wanted))
        circle = await client.circle(CALLERS, chosen.capacity_seconds, chosen.seed)
        per_s = len(circle.finished) / circle.counted_s
        table.add(f"capacity, {CALLERS} callers in a circle", f"{per_s:.1f} completions/s, {_tokens(circle)}")
        table.wrong += circle.wrong
        if not per_s:
            table.wrong.append(f"no completion has ended within {chosen.capacity_seconds:g} s: there is no capacity")
            return table
        usual, overload = (
            poisson(chosen.seed, chosen.streams, share * per_s, chosen.seconds) for share in (USUAL, OVERLOAD)
        )
        at_70 = await client.open_loop(usual, chosen.seconds)
        _describe(table, f"{USUAL:.0%}", at_70)
        async with probed(url, service.ports["health"], service.ports["control"]) as answers:
            at_200 = await client.open_loop(overload, chosen.seconds)
        _describe(table, f"{OVERLOAD:.0%}", at_200)
        _compare(table, circle, at_70, at_200)
        _describe_answers(table, answers)
        await _check_quiet(table, stubs[0])
    return table


def _tokens(phase: Phase) -> str:
    return f"{phase.goodput:.0f} tokens/s"


def _describe(table: Table, name: str, phase: Phase) -> None:
    table.add(f"{name}: calls", f"{len(phase.calls)} ({len(phase.calls) / phase.seconds:.1f}/s), {_tokens(phase)}")
    table.add(f"{name}: open at once", f"mean {phase.mean_open:.0f}, most {phase.most_open}")
    lost = sum(bool(call.fault) for call in phase.calls)
    table.add_bound(f"{name}: ends lost or twice", str(lost), "0", holds=lost == 0)
    others = len(phase.wrong) - lost
    table.add_bound(f"{name}: other tokens, other codes", str(others), "0", holds=others == 0)
    table.wrong += (f"{name}: {sentence}" for sentence in phase.wrong)
    table.add_time(f"{name}: the client was late by", phase.late_s)


def _compare(table: Table, circle: Phase, usual: Phase, overload: Phase) -> None:
    admitted = [(call.accepted_s or 0.0) - call.began_s for call in usual.calls if call.accepted_s]
    table.add_time(f"{USUAL:.0%}: admission", admitted, ADMISSION_MS)
    first = [(call.first_token_s or 0.0) - call.began_s for call in usual.calls if call.first_token_s]
    table.add_time(f"{USUAL:.0%}: first token", first)
    table.add_bound(f"{USUAL:.0%}: refused", str(len(usual.refused)), "0", holds=not usual.refused)
    peak = max(circle.goodput, usual.goodput)
    share = overload.goodput / peak if peak else 0.0
    found = f"{_tokens(overload)}, {share:.0%} of the peak"
    table.add_bound(f"{OVERLOAD:.0%}: goodput", found, f"≥ {GOODPUT:.0%}", holds=share >= GOODPUT)
    refused = [call.ended_s - call.began_s for call in overload.refused]
    table.add_time(f"{OVERLOAD:.0%}: a refusal takes", refused, REFUSAL_MS)


def _describe_answers(table: Table, answers: Answers) -> None:
    for name, times_s in answers.times_s.items():
        table.add_time(f"{OVERLOAD:.0%}: {name}", times_s, ANSWER_MS)
    table.wrong += (f"{OVERLOAD:.0%}: {sentence}" for sentence in answers.wrong)


async def _check_quiet(table: Table, stub: GenerationServiceStub) -> None:
    """When all calls have ended, nothing of them is held any more."""
    deadline = time.monotonic() + QUIET_S
    while True:
        stats = (await stub.Stats(StatsRequest())).stats
        held = stats.blocks.owned + stats.blocks.fenced + stats.requests.running + stats.requests.waiting
        held += stats.front_end.open_streams + stats.held.queued_tokens + stats.held.tokenizing_bytes
        if held == 0 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    table.add_bound("held when all have ended", str(held), "0", holds=held == 0)
    if held:
        table.wrong.append(f"{QUIET_S:.0f} s after the last call the service still holds {held} blocks, rows or places")


def main() -> int:
    """Print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="make load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate (60)")
    parser.add_argument("--capacity-seconds", type=float, default=20.0, help="in which the capacity is measured (20)")
    parser.add_argument("--streams", type=int, default=200, help="sources of calls, independent of each other (200)")
    parser.add_argument("--cases", type=int, default=COUNT, help=f"different requests ({COUNT})")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (1)")
    parser.add_argument("--frontends", type=int, default=1, help="front ends of the service (1)")
    chosen = parser.parse_args()
    print(machine(), flush=True)
    gc.collect()
    gc.freeze()  # as front ends do: the client waits for no collection of what it has loaded
    flags = ["--max-streams", str(OPEN_STREAMS), "--frontends", str(chosen.frontends), "--no-request-log"]
    with local_service(flags) as service:
        table = asyncio.run(measure(service, chosen))
    print(f"{chosen.streams} sources, {chosen.seconds:g} s of each rate, {CHANNELS} connections, seed {chosen.seed}")
    print(f"{table.text()}\nat the end {load_average()}", flush=True)
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
