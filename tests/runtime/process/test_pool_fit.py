"""A start whose memory runs out: on a GPU that is made of numbers, through all of the start, and on the CPU."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
import torch
from structlog.testing import capture_logs

from runahead.cuda_graphs.cuda_device import Taken, allocate_mapped_rings, pinned
from runahead.cuda_graphs.rings import RingLayout, RingMemory, allocate_rings, ring_bytes
from runahead.runtime import models
from runahead.runtime.checkpoint import Checkpoint, open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.log_output import LogOutput, end_log
from runahead.runtime.models.drafters import draft_model
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import KeptBytes
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import described
from runahead.runtime.process import cpu, cuda, main
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.pool_fit import TRIAL_BLOCKS, Needs, PoolFit, is_out_of_memory, overhead
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

BUNDLED = Path(models.__path__[0]) / "bundled"
MIB = 1 << 20
MEMORY, ELSEWHERE = 2048 * MIB, 64 * MIB  # of the GPU, and what somebody else has of it
BUFFERS, LAUNCHES, GRAPHS = 100 * MIB, 40 * MIB, 24 * MIB
ROW_BLOCKS = 2048 // 16
CONFIG = EngineConfig(model=str(BUNDLED), device="cuda", max_rows=400)  # more than memory holds at full length


class OutOfMemoryDuringCaptureError(RuntimeError):
    """What the driver's errors are like."""


class NumbersOfAGpu:
    """The memory of a GPU, as what is alive has taken it. fails_at: which of the devices made meets an allocation that
    fails, by number from 0 (the trial is the first), and where."""

    def __init__(self) -> None:
        self.taken = {0: ELSEWHERE}
        self.fails_at: dict[int, str] = {}
        self.pools: list[int] = []  # blocks of every program made
        self.keys = 1

    @property
    def free(self) -> int:
        return MEMORY - sum(self.taken.values())

    def take(self, owner: object, size: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        if size > self.free:
            raise error(f"CUDA out of memory. Tried to allocate {size} bytes.\nAnd more lines of advice.")
        self.keys += 1
        self.taken[self.keys] = size
        weakref.finalize(owner, self.taken.pop, self.keys)

    def fail(self, where: str) -> None:
        if self.fails_at.get(len(self.pools) - 1) == where:
            self.take(object(), MEMORY, OutOfMemoryDuringCaptureError)


class Program:
    def __init__(self, gpu: NumbersOfAGpu, model: Any, num_blocks: int) -> None:
        gpu.pools.append(num_blocks)
        gpu.fail("pool")
        gpu.take(self, BUFFERS)
        gpu.take(self, num_blocks * kept_block(model))


def kept_block(model: Any) -> int:
    """In the dtype that the model has here."""
    sizes = [layer.mixer.keeps.kv for layer in model.weights.layers]
    return sum(2 * 16 * heads * dim * 4 for heads, dim in sizes)


class Device:
    """As `CudaDevice`, for what the engine is put together of."""

    def __init__(self, gpu: NumbersOfAGpu, program: Program, rings: Any, progress: Any, is_trial: bool) -> None:
        self.program, self.rings, self._gpu = program, rings, gpu
        self.buckets, self.mixed_buckets, self.calls_at_once = (1,), (32,), 960
        gpu.fail("warm-up")
        running = Program.__new__(Program)
        gpu.take(running, LAUNCHES)
        del running
        progress(0, 1)
        gpu.fail("capture")
        gpu.take(self, GRAPHS)
        progress(1, 1)
        self.taken = Taken(LAUNCHES, GRAPHS)
        self.is_trial = is_trial

    def hold_memory(self) -> None:
        self._gpu.take(self, LAUNCHES)

    def close(self) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> NumbersOfAGpu:
    found = NumbersOfAGpu()

    def load(checkpoint: Checkpoint, _: Any, dtype: Any, load_format: str, kernels: Any, *rest: Any) -> object:
        if found.fails_at.get(-1) == "weights":
            found.take(object(), MEMORY)
        return load_model(checkpoint, torch.device("cpu"), torch.float32, load_format, ReferenceKernels(), *rest)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (found.free, MEMORY))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "load_model", load)
    monkeypatch.setattr(cuda, "allocate_mapped_rings", allocate_rings)
    monkeypatch.setattr(cuda, "keep_kernels", lambda folder, called: None)
    monkeypatch.setattr(
        cuda, "TritonProgram", lambda model, rings, num_blocks, **sizes: Program(found, model, num_blocks)
    )
    monkeypatch.setattr(
        cuda,
        "CudaDevice",
        lambda program, rings, progress, is_trial, **sizes: Device(found, program, rings, progress, is_trial),
    )
    return found


def start(config: EngineConfig = CONFIG) -> tuple[Any, list[dict[str, Any]]]:
    with capture_logs() as events:
        parts = assemble(config, lambda done, total: None, lambda done, total: None)
    return parts, [dict(event) for event in events]


def named(events: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    (event,) = [event for event in events if event["event"] == name]
    return event


def test_the_pool_is_what_a_trial_leaves_and_all_of_the_trial_is_given_back(gpu: NumbersOfAGpu) -> None:
    parts, events = start()
    memory, taken = named(events, "memory"), named(events, "memory_taken")
    assert gpu.pools == [TRIAL_BLOCKS, parts.info.num_blocks]
    assert not parts.device.is_trial
    assert memory["free_bytes"] == MEMORY - ELSEWHERE, "nothing of the trial is left"
    assert (memory["buffer_bytes"], memory["launch_bytes"], memory["graph_bytes"]) == (BUFFERS, LAUNCHES, GRAPHS)
    block = memory["kv_bytes"] // parts.info.num_blocks
    left = memory["free_bytes"] - BUFFERS - LAUNCHES - GRAPHS - overhead(MEMORY) - memory["kv_bytes"]
    assert 0 <= left < block, "the largest pool that fits"
    assert taken["free_bytes"] == gpu.free >= overhead(MEMORY)
    assert (taken["kv_bytes"], taken["graph_bytes"], taken["of_bytes"]) == (memory["kv_bytes"], GRAPHS, MEMORY)


@pytest.mark.parametrize("where", ["pool", "warm-up", "capture"])
def test_memory_that_runs_out_is_met_once_with_a_smaller_pool(gpu: NumbersOfAGpu, where: str) -> None:
    gpu.fails_at = {1: where}
    parts, events = start()
    trial, first, second = gpu.pools
    assert (trial, second) == (TRIAL_BLOCKS, first * 9 // 10)
    assert parts.info.num_blocks == second == parts.scheduler.pool.total + 1
    said = named(events, "memory_ran_out")
    assert (said["blocks"], said["blocks_next"], said["log_level"]) == (first, second, "warning")
    assert "\n" not in said["why"] and "out of memory" in said["why"]
    assert named(events, "memory_taken")["kv_bytes"] < named(events, "memory")["kv_bytes"]
    held = BUFFERS + GRAPHS + LAUNCHES  # the last before any launch needs it
    assert gpu.free == MEMORY - ELSEWHERE - held - named(events, "memory_taken")["kv_bytes"]


def test_memory_that_runs_out_twice_is_a_sentence_with_all_that_takes_memory(gpu: NumbersOfAGpu) -> None:
    gpu.fails_at = {1: "capture", 2: "capture"}
    with pytest.raises(ConfigError) as refusal:
        start()
    assert len(gpu.pools) == 3, "no third attempt"
    weights, blocks, pool = map(int, re.findall(r"\d+", str(refusal.value))[:3])
    assert str(refusal.value) == (
        f"memory ran out: the weights take {weights} MiB, {blocks} KV blocks {pool} MiB, buffers 140 MiB, "
        "graphs 24 MiB; set max_rows, max_prefill_tokens or context_length to less"
    )
    assert blocks == gpu.pools[2]
    assert 10 < weights < 30


def test_states_and_their_snapshots_are_named_where_they_take_memory() -> None:
    spelled = {name: f"--{name.replace('_', '-')}" for name in ("max_rows", "state_snapshots", "draft_tokens")}
    config = EngineConfig(model="", max_rows=8, spelled=spelled)

    def refused(kept: KeptBytes, snapshots: int) -> str:
        fit = PoolFit(config, 100 * MIB, kept, snapshots, lambda blocks: None, lambda blocks: None)
        return fit.refusal(50, Needs(buffers=MIB))

    rest = "buffers 1 MiB, graphs 0 MiB; set"
    assert refused(KeptBytes(block=MIB, row=5 * MIB, snapshot=4 * MIB), 3) == (
        "memory ran out: the weights take 100 MiB, 50 KV blocks 50 MiB, the states of 8 rows 40 MiB, 3 snapshots of "
        f"states 12 MiB, {rest} --state-snapshots, --draft-tokens, --max-rows, max_prefill_tokens or context_length to "
        "less"
    )
    assert refused(KeptBytes(block=MIB, row=4 * MIB, snapshot=4 * MIB), 0) == (
        "memory ran out: the weights take 100 MiB, 50 KV blocks 50 MiB, the states of 8 rows 32 MiB, "
        f"{rest} --max-rows, max_prefill_tokens or context_length to less"
    )


def test_a_pool_that_somebody_has_set_is_never_made_smaller(gpu: NumbersOfAGpu) -> None:
    gpu.fails_at = {1: "capture"}
    config = msgspec.structs.replace(CONFIG, num_blocks=3000, spelled={"num_blocks": "--num-blocks"})
    with pytest.raises(ConfigError, match=r"3000 KV blocks .*, graphs 24 MiB; set --num-blocks, max_rows, .* to less"):
        start(config)
    assert gpu.pools == [TRIAL_BLOCKS, 3000]
    gpu.fails_at = {}
    assert start(config)[0].info.num_blocks == 3000


def test_a_pool_too_small_for_one_request_is_no_second_attempt(gpu: NumbersOfAGpu) -> None:
    """The smaller one would not hold a request of full length."""
    gpu.taken[0] = MEMORY - BUFFERS - LAUNCHES - GRAPHS - overhead(MEMORY) - 13 * MIB
    gpu.fails_at = {1: "capture"}
    with pytest.raises(ConfigError, match=r"memory ran out: .*\(memory holds \d+ KV blocks; one request of 2048"):
        start()
    assert gpu.pools[1] >= ROW_BLOCKS + 1 > gpu.pools[1] * 9 // 10


@pytest.mark.parametrize("num_blocks", [0, 3000])
@pytest.mark.parametrize("where", ["pool", "warm-up", "capture"])
def test_a_trial_that_does_not_fit_is_a_sentence(gpu: NumbersOfAGpu, where: str, num_blocks: int) -> None:
    """Which names the pool of the trial, and not the one that was asked for."""
    gpu.fails_at = {0: where}
    sentence = "2 KV blocks 0 MiB, and what launches need beside them does not fit; set max_rows"
    with pytest.raises(ConfigError, match=sentence):
        start(msgspec.structs.replace(CONFIG, num_blocks=num_blocks))


def test_a_pool_that_leaves_no_room_for_launches_beside_graphs_is_refused(gpu: NumbersOfAGpu) -> None:
    """The warm-up fits, and the captures, at which what launches had needed was given back."""
    parts, events = start()
    block = named(events, "memory")["kv_bytes"] // parts.info.num_blocks
    del parts
    blocks = (gpu.free - BUFFERS - LAUNCHES - GRAPHS // 2) // block
    config = msgspec.structs.replace(CONFIG, num_blocks=blocks)
    with pytest.raises(ConfigError, match=f"memory ran out: .*, {blocks} KV blocks .*; set num_blocks"):
        start(config)
    assert start(msgspec.structs.replace(CONFIG, num_blocks=blocks - GRAPHS // block))[0].info.num_blocks < blocks


def test_weights_that_do_not_fit_are_a_sentence(gpu: NumbersOfAGpu) -> None:
    gpu.fails_at = {-1: "weights"}
    with pytest.raises(ConfigError, match=r"memory ran out while the weights were loaded, which take 9 MiB"):
        start()


@pytest.mark.parametrize("fails_at", [{-1: "weights"}, {0: "capture"}, {1: "capture", 2: "warm-up"}], ids=str)
def test_the_engine_s_process_ends_with_one_sentence_and_was_never_ready(
    gpu: NumbersOfAGpu, fails_at: dict[int, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.fails_at = fails_at
    log = LogOutput(level="error", format="json")
    orders = msgspec.json.encode(main.Orders("/nowhere", os.getppid(), CONFIG, log))
    monkeypatch.setattr(main, "_first_line", lambda: orders)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("sys.stderr", sys.stderr)  # which the process makes a stream with a thread of its own
    try:
        assert main.main() == main.EXIT_CANNOT_START
    finally:
        end_log()
        structlog.reset_defaults()
    output = capfd.readouterr()
    assert output.out == ""
    (sentence,) = output.err.splitlines()
    assert sentence.startswith("memory ran out")


def test_host_memory_that_cannot_be_pinned_is_a_sentence_and_no_reason_for_a_smaller_pool(
    gpu: NumbersOfAGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nAnd more lines of advice.")

    config = msgspec.structs.replace(CONFIG, spelled={"max_rows": "--max-rows"})
    asked: list[int] = []

    def rings(layout: RingLayout) -> RingMemory:
        asked.append(ring_bytes(layout))
        return allocate_mapped_rings(layout)

    monkeypatch.setattr(cuda, "allocate_mapped_rings", rings)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with pytest.raises(ConfigError) as refusal:
        start(config)
    sizes = re.findall(r"[\d.]+", str(refusal.value))
    assert str(refusal.value) == (
        f"{sizes[0]} bytes of host memory can't be pinned for the GPU: CUDA error: out of memory; plans and results of "
        f"launches take {asked[0] / MIB:.1f} MiB of it in all: set max_prefill_tokens, --max-rows or run_ahead to "
        "less, or give the host more memory"
    )
    assert 0 < int(sizes[0]) < asked[0]
    assert gpu.pools == [], "not even a trial"
    with pytest.raises(OSError, match=r"^24 bytes of host memory can't be pinned") as raised:
        pinned((3,), np.int64)  # the marks, of which each device makes its own
    assert not is_out_of_memory(raised.value)


def test_any_other_error_is_what_it_was(gpu: NumbersOfAGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**sizes: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cuda, "CudaDevice", lambda *parts, **sizes: broken())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        start()


def raised(make: Callable[[], object]) -> Exception:
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_what_ends_a_capture_may_fail_of_an_allocation_in_it() -> None:
    def capture() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    assert is_out_of_memory(raised(capture))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("device-side assert triggered"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_what_drafts_counts_in_what_memory_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model drafts for itself: twice its weights."""
    config = EngineConfig(
        model=str(BUNDLED), device="cpu", max_rows=4, threads=1, drafter="model", draft_model=str(BUNDLED),
        num_blocks=400,
    )  # fmt: skip
    parts, events = start(config)
    parts.device.close()
    facts = named(events, "memory")
    stored = 2 * described(load_config(open_checkpoint(BUNDLED))).parameters * 4 // MIB
    taken = (facts["weight_bytes"] + facts["draft_weight_bytes"]) // MIB
    assert facts["weight_bytes"] == facts["draft_weight_bytes"]
    assert facts["pool_bytes"] == facts["kv_bytes"] + facts["draft_kv_bytes"] == 2 * facts["kv_bytes"] > 0

    def lacking(*parts: object, **rest: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried too much")

    monkeypatch.setattr(cpu, "HostProgram", lacking)
    with pytest.raises(ConfigError, match=f"memory ran out: the weights take {taken} MiB"):
        start(config)
    monkeypatch.setattr(draft_model, "load_model", lacking)
    with pytest.raises(ConfigError, match=f"while the weights were loaded, which take {stored} MiB"):
        start(config)


class FailingZeros:
    """torch.zeros, which fails for the first so many pools; those of the kernels' trial are small."""

    def __init__(self, fails: int) -> None:
        self.zeros, self.fails, self.blocks = torch.zeros, fails, list[int]()

    def __call__(self, *shape: Any, **rest: Any) -> torch.Tensor:
        size = shape[0] if shape and isinstance(shape[0], tuple) else ()
        if len(size) == 4 and size[0] > ROW_BLOCKS and (not self.blocks or self.blocks[-1] != size[0]):
            self.blocks.append(size[0])
            if len(self.blocks) <= self.fails:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried too much")
        return self.zeros(*shape, **rest)


@pytest.mark.parametrize("fails", [1, 2])
def test_on_the_cpu_too_a_smaller_pool_is_tried_once(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FailingZeros(fails)
    monkeypatch.setattr("runahead.runtime.models.memory.torch.zeros", allocator)
    config = EngineConfig(model=str(BUNDLED), max_rows=4, device="cpu", threads=1)
    if fails == 2:
        with pytest.raises(ConfigError, match=r"memory ran out: the weights take \d+ MiB, \d+ KV blocks \d+ MiB"):
            start(config)
        return
    parts, events = start(config)
    parts.device.close()
    first, second = allocator.blocks
    assert parts.info.num_blocks == second == first * 9 // 10
    assert named(events, "memory_ran_out")["blocks"] == first
