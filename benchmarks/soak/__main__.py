"""`make soak`: every fault at once for ten minutes, and what it leaves behind.

The service has two front ends, one of which is killed now and then, a few KV blocks, and limits that are reached.
Beside the faults there are ordinary callers, and a canary asks the same each second.

Exits with status 1 if the canary or an ordinary caller gets other tokens, if a call has no end or another than it
should, if a process, a descriptor, a KV block or anything else is still held in the end, or if a fault never happened.
How fast memory grows is printed beside its goal.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks.load.table import Table, load_average, machine
from benchmarks.local_service import ServiceFailed, local_service
from benchmarks.soak.call_faults import WANTED
from benchmarks.soak.growth import MIB, Series, growth, of_session
from benchmarks.soak.machine_faults import MACHINE_WANTED, Machine, ServiceLog, small_tmpdir
from benchmarks.soak.raw_faults import RAW_WANTED, STALLED_S, UPLOAD_S
from benchmarks.soak.run import FRONT_ENDS, WARM_UP, Soak, leaked_descriptors
from benchmarks.soak.world import World

SLOPE_GOAL = 1.0  # MiB a minute
FLAGS = (
    "--frontends", str(FRONT_ENDS), "--num-blocks", "150", "--max-streams", "120",
    "--upload-timeout-s", str(UPLOAD_S), "--stalled-stream-s", str(STALLED_S),
    "--max-connection-idle-s", "5",  # a client of gRPC may keep a connection that it was told to close
)  # fmt: skip


def report(soak: Soak) -> Table:
    """What is printed in the end. What was wrong is in the table too."""
    table, world = Table(), soak.world
    table.wrong += world.wrong
    seconds = max(2.0, soak.seconds)
    found = f"{soak.canaries} answers, all alike, the slowest after {soak.slowest_s:.1f} s"
    table.add("the canary", found, "the same tokens each time")
    table.add("the slowest call that ended as it should", f"{world.slowest_s:.1f} s")
    if not soak.canaries:
        table.wrong.append("the canary has had no answer")
    for series in sorted(soak.series.values(), key=lambda series: (series.name, series.samples[0].at_s)):
        _memory(table, series, seconds)
    for name, before in soak.before.items():
        if after := soak.after.get(name):
            figures = f"threads {before.threads} → {after.threads}, descriptors {before.descriptors}"
            table.add(f"{name} when nothing is open", f"{figures} → {after.descriptors}", "flat")
    table.wrong += leaked_descriptors(soak.before, soak.after)
    blocks = soak.stats.blocks
    table.add("KV blocks when nothing is open", f"{blocks.free + blocks.cached} of {blocks.total}", str(blocks.total))
    _counts(table, soak)
    return table


def _memory(table: Table, series: Series, seconds: float) -> None:
    """The memory at the beginning and the end of a process. The slope over the second half of the soak, of a process
    that had warmed up before it and lived to its end, with its standard error. seconds: of the soak."""
    half_s = seconds / 2
    first, last = series.samples[0], series.samples[-1]
    most = max(sample.resident_bytes for sample in series.samples)
    figures = f"{first.resident_bytes / MIB:.0f} → {last.resident_bytes / MIB:.0f} MiB, most {most / MIB:.0f}"
    name = f"memory of {series.name}, from {first.at_s:.0f} s to {last.at_s:.0f} s"
    late = series.since(half_s)
    grows = growth(late)
    lived = bool(late) and first.at_s <= seconds * WARM_UP and late[-1].at_s - half_s > 0.9 * half_s
    if not lived:
        table.add(name, figures)
        return
    if grows is None:
        table.add(name, f"{figures}; growth not judged: too few samples")
        return
    found = f"{figures}; second half {grows.slope:+.2f} ± {grows.error:.2f} MiB/min"
    if grows.error > SLOPE_GOAL / 2:
        table.add(name, f"{found}; growth not judged: too noisy")
        return
    table.add_bound(name, found, f"< {SLOPE_GOAL:g} MiB/min", holds=grows.is_below(SLOPE_GOAL))


def _counts(table: Table, soak: Soak) -> None:
    """Add the counts of required and other events. The engine's and the service's are their own figures."""
    stats, wanted = (
        soak.stats,
        [*WANTED, *RAW_WANTED, *MACHINE_WANTED, "front ends killed", "ordinary completions that ended well"],
    )
    counts = dict(soak.world.counts)
    seen = {f"the engine's own count: {name}": stats.lifecycle.events[name].count for name in ("paused", "evicted")}
    seen |= {
        f"the engine's own count: ended from outside in {phase}": stats.lifecycle.aborted[phase]
        for phase in ("WAITING", "PREFILL", "DECODE")
    }
    seen["the service's own count: streams that nobody reads"] = stats.front_end.slow_readers
    seen["the service's own count: lines of the log that were dropped"] = sum(
        process.log_lines_dropped for process in stats.processes
    )
    seen["the service's own count: front ends lost"] = stats.lifecycle.front_ends_lost
    for name in [*wanted, *seen]:
        count = counts.pop(name, 0) + seen.get(name, 0)
        table.add_bound(name, str(count), "> 0", holds=count > 0)
        if not count:
            table.wrong.append(f"{name}: this has never happened")
    for name, count in sorted(counts.items()):
        table.add(name, str(count))


def main() -> int:
    """Print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults (600)")
    parser.add_argument("--seed", type=int, default=1, help="of when what is done (1)")
    chosen = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder, small_tmpdir(Path(folder) / "tmp") as tmpdir:
        world = World(chosen.seed)
        callers = Path(folder) / "callers"
        callers.write_text(world.callers_file, encoding="utf-8")
        log = ServiceLog(Path(folder))
        environment = {} if tmpdir is None else {"TMPDIR": str(tmpdir)}
        try:
            flags = [*FLAGS, "--callers", str(callers)]
            with local_service(flags, output=log.open, environment=environment) as service:
                world.url = service.url
                soak = Soak(world, chosen.seconds, Machine(world, service.process.pid, log, tmpdir))
                asyncio.run(soak.run())
                table = report(soak)
                left = len(of_session(service.process.pid))
                # A front end that was killed has no process for structures before it needs one, and others have one.
                most = soak.processes + FRONT_ENDS - 1
                table.add_bound("processes", f"{soak.processes} → {left}", f"at most {most}", holds=left <= most)
                if left > most:
                    table.wrong.append(f"there were {soak.processes} processes, and are {left}")
        except ServiceFailed as error:
            print(f"WRONG: {error}")
            return 1
        finally:
            log.close()
    print(f"{table.text()}\nat the end {load_average()}", flush=True)
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
