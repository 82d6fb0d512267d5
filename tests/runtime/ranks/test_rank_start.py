"""How ranks are started and ended, with processes that say what a test wants, and what is refused before."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.process import rank, rank_start
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.rank import EXIT_CANNOT_START
from runahead.runtime.process.rank_start import BlocksOffered, OtherRanks, RankOrders, RankProcesses, StartedRanks
from runahead.runtime.ranks.segment import Segment, SegmentLayout, make_memory, segment_bytes
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.ranks.rank_engines import SIZES

LAYOUT = SegmentLayout(3, RingLayout(4, 64, 64, 4, 4), 64)
HEARS = "import json, sys\norders = json.loads(sys.stdin.readline())\n"
LOADED = HEARS + "print(json.dumps({}), flush=True)\n"
OFFERS = LOADED + (
    "blocks = json.loads(sys.stdin.readline())['blocks']\n"
    "print(json.dumps({'blocks': min(blocks, 100 * orders['rank'])}), flush=True)\n"
    "print(json.dumps({'digest': str(json.loads(sys.stdin.readline())['blocks'])}), flush=True)\n"
)


def started(script: str, ranks: int = 3, limit_s: float = 60.0) -> RankProcesses:
    layout, config = msgspec.structs.replace(LAYOUT, ranks=ranks), EngineConfig(model="m")
    orders = [
        RankOrders(layout=layout, config=config, context=64, parent=os.getpid(), rank=rank, descriptor=0)
        for rank in range(1, ranks)
    ]
    return RankProcesses(orders, (sys.executable, "-c", script), limit_s)


@pytest.fixture
def starts(request: pytest.FixtureRequest) -> Callable[[str], RankProcesses]:
    def start(script: str) -> RankProcesses:
        processes = started(script)
        request.addfinalizer(processes.close)
        return processes

    return start


@pytest.mark.parametrize(("blocks", "least"), [(150, 100), (80, 80)])
def test_all_ranks_have_as_many_blocks_as_the_least_of_them(
    starts: Callable[[str], RankProcesses], blocks: int, least: int
) -> None:
    ranks = starts(OFFERS)
    ranks.loaded()
    assert ranks.offer(blocks, snapshots=0) == least
    ranks.captured(str(least))


def test_a_start_no_longer_waits_for_a_rank_that_has_ended(
    starts: Callable[[str], RankProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = starts(HEARS + "sys.stdin.read()")
    lost, looked, stopped = ranks.lost, threading.Semaphore(0), threading.Event()

    def look() -> str:
        looked.release()
        return lost()

    monkeypatch.setattr(ranks, "lost", look)
    descriptor, memory = make_memory(LAYOUT)
    segment = Segment(LAYOUT, memory)
    segment.begin()
    monkeypatch.setattr(segment, "abort", stopped.set)
    StartedRanks(others=OtherRanks(segment, memory, ranks))
    assert looked.acquire(timeout=30.0) and looked.acquire(timeout=30.0)
    assert not stopped.is_set(), "all ranks run"
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert stopped.wait(30.0)
    os.close(descriptor)


def test_every_rank_has_the_handles_of_all_mailboxes(starts: Callable[[str], RankProcesses]) -> None:
    ranks = starts(
        HEARS + "print(json.dumps({'handle': '0' + str(orders['rank'])}), flush=True)\n"
        "handles = json.loads(sys.stdin.readline())['handles']\n"
        "print(json.dumps({'digest': ' '.join(handles)}), flush=True)\n"
    )
    assert ranks.mailboxes("00") == ("00", "01", "02")
    ranks.captured("00 01 02")


def test_a_rank_that_has_captured_other_graphs_is_refused_by_a_sentence(
    starts: Callable[[str], RankProcesses],
) -> None:
    ranks = starts(HEARS + "print(json.dumps({'digest': 'a' if orders['rank'] == 1 else 'b'}), flush=True)\n")
    with pytest.raises(ConfigError, match="rank 2 has captured other graphs than rank 0"):
        ranks.captured("a")


def test_a_rank_that_can_t_start_is_named_with_its_exit_code(starts: Callable[[str], RankProcesses]) -> None:
    ranks = starts(HEARS + "sys.exit(orders['rank'] + 1)")
    with pytest.raises(ConfigError, match=r"rank 1 could not .*exit code 2|rank 2 could not .*exit code 3"):
        ranks.loaded()


def test_the_reason_why_a_rank_can_t_start_reaches_rank_0(starts: Callable[[str], RankProcesses]) -> None:
    ranks = starts(
        HEARS + "orders['rank'] == 2 and print(json.dumps({'reason': 'no room'}), flush=True)\nsys.stdin.read()"
    )
    with pytest.raises(ConfigError, match="rank 2 could not start: no room"):
        ranks.loaded()


def test_a_library_that_prints_in_a_rank_is_named_by_what_it_prints(starts: Callable[[str], RankProcesses]) -> None:
    ranks = starts(HEARS + "orders['rank'] == 2 and print('two plugins', flush=True)\nsys.stdin.read()")
    with pytest.raises(ConfigError, match=r"rank 2 wrote b'two plugins\\n' to its standard output and not RankLoaded"):
        ranks.loaded()


def test_a_rank_says_what_is_wrong_with_its_orders(request: pytest.FixtureRequest) -> None:
    layout = SegmentLayout(2, RingLayout(4, 64, 64, 4, 4), 64)
    config = EngineConfig(model="m", run_ahead=99)
    orders = RankOrders(layout=layout, config=config, context=64, parent=os.getpid(), rank=1, descriptor=0)
    ranks = RankProcesses([orders])
    request.addfinalizer(ranks.close)
    with pytest.raises(ConfigError, match=r"rank 1 could not start: .*run_ahead"):
        ranks.loaded()


def test_a_rank_that_has_ended_is_noticed_while_another_one_loads(starts: Callable[[str], RankProcesses]) -> None:
    ranks = starts(HEARS + "sys.exit(9) if orders['rank'] == 2 else sys.stdin.read()")
    with pytest.raises(ConfigError, match=r"rank 2 could not start \(exit code 9\)"):
        ranks.loaded()


def test_a_start_waits_for_a_rank_that_is_stopped_up_to_a_limit(request: pytest.FixtureRequest) -> None:
    stops = "import os, signal\norders['rank'] == 1 and os.kill(os.getpid(), signal.SIGSTOP)\nsys.stdin.read()"
    ranks = started(HEARS + stops, limit_s=0.1)
    request.addfinalizer(ranks.close)
    with pytest.raises(ConfigError, match=r"rank 1 could not start within 0\.1 s: it is stopped, or"):
        ranks.loaded()


def test_the_rank_that_failed_is_named_and_not_those_that_it_has_stopped(
    starts: Callable[[str], RankProcesses],
) -> None:
    ranks = starts(LOADED + "sys.exit(7 * (orders['rank'] - 1))")
    ranks.loaded()
    for each in ranks._processes:
        each.process.wait(30.0)
    assert ranks.lost() == "rank 2 has ended (exit code 7)"


def test_a_rank_whose_parent_ended_before_it_began_ends(capfd: pytest.CaptureFixture[str]) -> None:
    layout = SegmentLayout(2, RingLayout(4, 64, 64, 4, 4), 64)
    config = EngineConfig(model="m")
    orders = RankOrders(layout=layout, config=config, context=64, parent=os.getpid() + 1, rank=1, descriptor=0)
    ended = subprocess.run(rank_start.COMMAND, input=msgspec.json.encode(orders) + b"\n", check=False)
    assert ended.returncode == EXIT_CANNOT_START
    assert "rank 0 has ended before its ranks began" in capfd.readouterr().err


def test_a_rank_that_has_ended_is_named_and_its_pipe_says_so(starts: Callable[[str], RankProcesses]) -> None:
    ranks = starts(LOADED + "sys.stdin.read() if orders['rank'] == 1 else sys.exit(7)")
    ranks.loaded()
    assert not ranks._processes[1].process.stdout.read(), "it ends"  # type: ignore[union-attr]
    ranks._processes[1].process.wait(30.0)
    assert ranks.lost() == "rank 2 has ended (exit code 7)"
    assert len(ranks.sentinels()) == 2


class NotedPart:
    """A `RankPart` that makes nothing. done: what was asked of it, in order."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def load(self, checkpoint: object, described: object) -> None:
        self._done.append("load")

    def begin(self) -> None:
        self._done.append("begin")

    def blocks(self, offered: BlocksOffered) -> int:
        self._done.append("blocks")
        return offered.blocks

    def device(self, agreed: BlocksOffered) -> tuple[SimpleNamespace, str]:
        self._done.append("device")
        return SimpleNamespace(close=lambda: self._done.append("close")), ""


def test_a_rank_runs_what_rank_0_runs_before_it_hears_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs these launches exchange results: rank 0 would wait for them, and offer nothing before they have ended."""
    done, layout = list[str](), SegmentLayout(2, RingLayout(4, 64, 64, 4, 4), 64)

    def hear(kind: type[BlocksOffered]) -> BlocksOffered:
        done.append("offer")
        return kind(10, snapshots=0)

    monkeypatch.setattr(rank, "_part", lambda *given: NotedPart(done))
    monkeypatch.setattr(rank, "follow_launches", lambda *given: done.append("follow"))
    for name in ("open_checkpoint", "load_config"):
        monkeypatch.setattr(rank, name, lambda given: None)
    orders = RankOrders(layout=layout, config=EngineConfig(model="m"), context=64, parent=os.getpid(), rank=1)
    memory = memoryview(bytearray(segment_bytes(layout)))
    rank.follow(orders, memory, lambda said: done.append(type(said).__name__), hear, lambda: done.append("began"))
    assert done == [
        "load", "RankLoaded", "begin", "offer", "blocks", "BlocksMade", "offer", "device", "Captured", "began",
        "follow", "close",
    ]  # fmt: skip


def test_ranks_that_do_not_end_with_their_input_are_killed() -> None:
    ranks = started(LOADED + "import time\nwhile True: time.sleep(60)")
    ranks.loaded()
    begun = time.monotonic()
    ranks.close()
    assert {each.process.returncode for each in ranks._processes} == {-9}
    assert time.monotonic() - begun < 30.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel": 9}, r"tensor_parallel .*8"),
        ({"tensor_parallel": 0}, r"tensor_parallel .*1"),
    ],
)
def test_settings_that_ranks_can_t_have_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_config(EngineConfig(model="m", **{"tensor_parallel": 2, **settings}))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("olmo2", "tensor_parallel 2 can't be served: 2 ranks can't have parts of Olmo2ForCausalLM: its norms"),
        ("bamba", "tensor_parallel 2 can't be served: 2 ranks can't have equal parts of 1 groups of Mamba-2 heads"),
        ("qwen3_5", "tensor_parallel 2 can't be served: 2 ranks can't have equal parts of 3 heads of keys"),
    ],
)
def test_a_model_that_can_t_be_divided_is_refused_at_start(name: str, sentence: str, tmp_path: Path) -> None:
    save(next(case for case in CASES if case.name == name), tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        assemble(EngineConfig(model=str(tmp_path), tensor_parallel=2, **SIZES), lambda done, total: None)


def test_a_segment_without_memory_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(CASES[0], tmp_path)
    before = set(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    config = EngineConfig(model=str(tmp_path), tensor_parallel=2, **SIZES)
    with pytest.raises(ConfigError, match="tensor_parallel 2: there is no memory for the ranks' segment: No space"):
        assemble(config, lambda done, total: None)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_processors_that_do_not_order_stores_are_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CASES[0], tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="tensor_parallel 2 needs Linux on an x86-64 processor"):
        assemble(EngineConfig(model=str(tmp_path), tensor_parallel=2, **SIZES), lambda done, total: None)


def test_a_start_that_fails_leaves_no_rank_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have been started when rank 0 finds that it can't read its weights."""
    save(next(case for case in CASES if case.name == "llama"), tmp_path)
    ranks = list[RankProcesses]()

    def start(orders: list[RankOrders]) -> RankProcesses:
        ranks.append(RankProcesses(orders, (sys.executable, "-c", LOADED + "sys.stdin.read()")))
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-64])
        return ranks[0]

    monkeypatch.setattr(rank_start, "RankProcesses", start)
    with pytest.raises(CheckpointError, match="is cut off"):
        assemble(EngineConfig(model=str(tmp_path), tensor_parallel=2, **SIZES), lambda done, total: None)
    assert [each.process.returncode for each in ranks[0]._processes] == [0]
