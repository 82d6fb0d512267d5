"""Models with recurrent states, through the service: every depth gives the answers of `serial`, whatever befalls a row.

The events are those of the matrix, with drafts and without. A snapshot of a state is kept at every border between
blocks, in the tight pool too few for all rows. States and snapshots that are given back are poisoned.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parity.matrix import EVENTS, Run, saw_depth
from tests.parity.recurrent_checkpoints import HEADED, TRAINED, checkpoint_of
from tests.parity.services import depths_of, services_at_every_depth
from tests.parity.test_parity import ATTEMPTS, POOLS, compare_runs, run_cell, table

pytestmark = pytest.mark.timeout(0)  # each workload has its own

DRAFTS = 3
Started = Callable[[str, str, int], dict[tuple[str, str], str]]


@pytest.fixture(scope="module")
def started(large: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """URLs by pool and depth, of a family's services with this pool and so many drafts, and of the one that is serial
    with a roomy one and without drafts. Those of another pool end before."""
    with contextlib.ExitStack() as all_of_a_family, contextlib.ExitStack() as of_a_pool:
        folders: dict[str, Path] = {}
        running: dict[tuple[str, str, int], dict[tuple[str, str], str]] = {}
        expected: dict[str, str] = {}  # by family: of the one whose services run

        def start(stack: contextlib.ExitStack, family: str, pool: str, drafts: int, *depths: str) -> dict[str, str]:
            flags = ["--model", str(folders[family]), "--threads", "1", *POOLS[pool], "--state-snapshot-blocks", "1"]
            flags += ["--state-snapshots", "6" if pool == "tight" else "96"]
            drafter = "mtp" if family == HEADED else "ngram"
            flags += ["--drafter", drafter, "--draft-tokens", str(drafts)] if drafts else []
            services = services_at_every_depth(lambda i: [*flags, "--jitter-seed", str(41 + i)], depths)
            return stack.enter_context(services)

        def of(family: str, pool: str, drafts: int) -> dict[tuple[str, str], str]:
            if family not in folders:
                folders[family] = checkpoint_of(family, tmp_path_factory.mktemp(family))
            if family not in expected:
                of_a_pool.close()
                all_of_a_family.close()
                running.clear()
                expected.clear()
                expected[family] = start(all_of_a_family, family, "roomy", 0, "serial")["serial"]
            if (family, pool, drafts) not in running:
                of_a_pool.close()
                running.clear()
                depths = [depth for depth in depths_of(large=large) if (pool, depth) != ("roomy", "serial")]
                urls = start(of_a_pool, family, pool, drafts, *depths)
                running[family, pool, drafts] = {(pool, depth): url for depth, url in urls.items()}
            return {**running[family, pool, drafts], ("roomy", "serial"): expected[family]}

        yield of


def pool_of(event: str) -> str:
    return EVENTS[event].pool


BY_POOL: list[str] = sorted(EVENTS, key=pool_of)


# Families stand together, and in each the events of a pool: its services are started once. The bundled hybrid, Mamba-2
# with experts, has drafts and gated delta nets have none; the other way round where that is asked for, with Mamba-2 and
# dense feed-forwards, and with the head of the model's own checkpoint.
FAMILIES_AND_DRAFTS = [
    (TRAINED, DRAFTS),
    ("gated-delta-net", 0),
    (TRAINED, 0),
    ("mamba-2", DRAFTS),
    ("gated-delta-net", DRAFTS),
    (HEADED, DRAFTS),
]


def is_large(family: str, drafts: int, event: str) -> bool:
    """In every run the trained hybrid has the events of two pools, and gated delta nets those of the tight one, where
    states are given back and computed again."""
    pools = {(TRAINED, DRAFTS): ("roomy", "tight"), ("gated-delta-net", 0): ("tight",)}
    return pool_of(event) not in pools.get((family, drafts), ())


CASES = [
    pytest.param(*case, event, marks=[pytest.mark.large] if is_large(*case, event) else [])
    for case in FAMILIES_AND_DRAFTS
    for event in BY_POOL
]


def kind_of(event: str, drafts: int) -> str:
    """Greedy rows of a small model come to repeat themselves, and their drafts are right."""
    return "greedy" if drafts and event != "end-of-sequence" else "seeded-sampling"


@pytest.mark.parametrize(("family", "drafts", "event"), CASES)
def test_a_cell_of_the_matrix_has_the_answers_of_serial_in_a_roomy_pool(
    family: str, drafts: int, event: str, started: Started
) -> None:
    pool, kind = pool_of(event), kind_of(event, drafts)
    services = started(family, pool, drafts)
    for attempt in range(ATTEMPTS):
        runs = asyncio.run(run_cell(kind, event, 80 + attempt, services))
        compare_runs(event, runs)
        seen = {where: {**saw(event, run), **saw_depth(run)} for where, run in runs.items() if where[0] == pool}
        if kind == "greedy":
            for where in seen.keys() - {("roomy", "serial")}:
                seen[where]["drafts kept"] = runs[where].counted["drafts kept"]
        print(f"\n{family} / {event}: " + table(list(seen.values())))
        if all(count > 0 for happened in seen.values() for count in happened.values()):
            return
    pytest.fail(f"not everything that the cell is about happened in any of {ATTEMPTS} attempts: {seen}")


def saw(event: str, run: Run) -> dict[str, int]:
    """What happened, by name."""
    seen = {**EVENTS[event].witness(run), "snapshots kept": run.counted["snapshots kept"]}
    if event == "prefix-hit":
        seen["rows that began with a snapshot"] = run.counted["rows that began with a snapshot"]
    return seen
