"""FP8 keys and values through the service: every depth gives the answers of `serial` in a roomy pool without drafts.

The model is the bundled hybrid, so that blocks lie beside states and snapshots. Blocks given back are poisoned.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

import pytest

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.parity.matrix import EVENTS, saw_depth
from tests.parity.services import DEPTHS, services_at_every_depth
from tests.parity.test_parity import ATTEMPTS, POOLS, compare_runs, run_cell, table

pytestmark = pytest.mark.timeout(0)  # each workload has its own

FLAGS = (
    "--model",
    str(BUNDLED_FOLDER / "hybrid"),
    "--threads",
    "1",
    "--kv-dtype",
    "fp8",
    "--state-snapshot-blocks",
    "1",
)
OF_POOL = {
    "roomy": ("--state-snapshots", "96"),
    "tight": ("--state-snapshots", "6", "--drafter", "ngram", "--draft-tokens", "3"),
}
# Each cell's kind of requests, event, and the depths of its services in every run; with --large every depth.
CELLS = [
    ("seeded-sampling", "prefix-hit", ("serial", "4")),
    ("greedy", "forced-eviction", ("4",)),
]


def _flags(flags: list[str], service: int) -> list[str]:
    return [*flags, "--jitter-seed", str(51 + service)]


@pytest.fixture(scope="module")
def services(large: bool) -> Iterator[dict[tuple[str, str], str]]:
    """URLs by pool and depth."""
    with contextlib.ExitStack() as stack:
        found: dict[tuple[str, str], str] = {}
        for _, event, few in CELLS:
            pool = EVENTS[event].pool
            flags = [*FLAGS, *POOLS[pool], *OF_POOL[pool]]
            running = services_at_every_depth(partial(_flags, flags), DEPTHS if large else few)
            found |= {(pool, depth): url for depth, url in stack.enter_context(running).items()}
        yield found


@pytest.mark.parametrize(("kind", "event"), [cell[:2] for cell in CELLS])
def test_a_cell_of_the_matrix_has_the_answers_of_serial_with_fp8_keys_and_values(
    kind: str, event: str, services: dict[tuple[str, str], str]
) -> None:
    pool = EVENTS[event].pool
    mine = {where: url for where, url in services.items() if where[0] == pool or where == ("roomy", "serial")}
    for attempt in range(ATTEMPTS):
        runs = asyncio.run(run_cell(kind, event, 90 + attempt, mine))
        compare_runs(event, runs)
        seen = {
            where: {**EVENTS[event].witness(run), **saw_depth(run)} for where, run in runs.items() if where[0] == pool
        }
        if pool == "tight":
            for where, counts in seen.items():
                counts["drafts kept"] = runs[where].counted["drafts kept"]
        print(f"\n{kind} / {event}, FP8 KV: " + table(list(seen.values())))
        if all(count > 0 for happened in seen.values() for count in happened.values()):
            return
    pytest.fail(f"not everything that the cell is about happened in any of {ATTEMPTS} attempts: {seen}")
