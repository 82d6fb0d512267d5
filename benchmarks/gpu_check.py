"""Builds, checks and times runahead on a CUDA GPU: `python benchmarks/gpu_check.py [test] [time]`.

`test` runs the kernels' and the device's tests there. `time` prints one line for each model, batch and depth: seconds
of a decode step as the host's clock sees it over many launches, the device's idle time between launches, the overlap
ratio, the nodes of the graph, and the byte floor of the step. Random weights of the models' shapes, greedy.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings
from runahead.cuda_graphs.rings import RingLayout
from runahead.cuda_graphs.shape import Form
from runahead.runtime.engine.loop import Engine
from runahead.runtime.kernels.triton.kernel_set import TritonKernelSet
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.dense_decoder import DenseConfig
from runahead.runtime.models.llama import LlamaConfig
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.qwen3 import Qwen3Config
from runahead.runtime.models.rope import RopeScaling
from runahead.runtime.models.weights import dummy_weights
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.triton import TritonProgram
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import MAX_STOP_IDS, SamplingParams, StoppingParams

ROOT = Path(__file__).resolve().parent.parent
BUNDLED = "bundled"
BANDWIDTH = 4.6e12  # bytes a second that an H200 reads
CONTEXT = 1024
PROMPT = 512
STEPS = 200
WARM_STEPS = 20
BLOCK_SIZE = 16


@dataclass
class MemoryLinks:
    """One front end, as two lists. Only what ends is kept of what is sent."""

    inbox: list[tuple[int, m.ToEngine | None]] = field(default_factory=list)

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        while self.inbox:
            yield self.inbox.pop(0)

    @property
    def has_more(self) -> bool:
        return bool(self.inbox)

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        pass

    def wake_fds(self) -> Sequence[int]:
        return ()

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.0)


def shape_of(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, qwen3: bool, tied: bool
) -> DenseConfig:
    """A dense decoder of that size."""
    kind: type[DenseConfig] = Qwen3Config if qwen3 else LlamaConfig
    return kind(
        architecture="Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(),
        windows=(0,) * layers,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_ids=(0,),
        bos_token_id=None,
        dtype=torch.bfloat16,
    )


SHAPES = {
    "0.6B": shape_of(1024, 3072, 28, 16, 8, 128, 151936, True, True),
    "1B": shape_of(2048, 8192, 16, 32, 8, 64, 128256, False, True),
    "8B": shape_of(4096, 14336, 32, 32, 8, 128, 128256, False, False),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine's steady decode. Times are microseconds a launch."""

    step_us: float
    idle_us: float
    host_us: float
    overlap_ratio: float
    nodes: int


def steady_decode(model: Decoder, rows: int, run_ahead: int, temperature: float) -> Measured:
    """STEPS launches with `rows` rows at contexts from PROMPT on."""
    config = model.config
    bulk_words, prefill = 1 << 15, 8192
    layout = RingLayout(run_ahead + 2, PLAN_WORDS, bulk_words, rows, 4)
    rings = allocate_mapped_rings(layout)
    num_blocks = rows * CONTEXT // BLOCK_SIZE + 1
    program = TritonProgram(
        model,
        rings,
        max_rows=rows,
        max_tokens=rows + prefill,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        context_length=CONTEXT,
    )
    device = CudaDevice(program, rings, max_rows=rows, mixed_tokens=prefill)
    limits = SchedulerLimits(CONTEXT, config.vocab_size, (), PROMPT, prefill, PLAN_WORDS, bulk_words)
    ledger: Ledger[Deferred] = Ledger(run_ahead, 1 << 14)
    scheduler = Scheduler(limits, Rows(rows, MAX_STOP_IDS, CONTEXT), BlockPool(num_blocks, BLOCK_SIZE), ledger)
    links = MemoryLinks()
    engine = Engine(device, scheduler, links, max_queue=1000)
    dice = np.random.default_rng(0)
    for handle in range(rows):
        prompt = dice.integers(1, config.vocab_size, PROMPT).astype(np.int32)
        sampling = SamplingParams(temperature=temperature, seed=handle)
        stopping = StoppingParams(max_tokens=CONTEXT - PROMPT - 1, ignore_eos=True)
        links.inbox.append((1, m.Submit(handle, f"r{handle}", prompt.tobytes(), sampling, stopping)))
    while scheduler.tally.counters["generated_tokens"] < WARM_STEPS * rows:
        engine.turn()
    figures = engine.figures
    first, begun = ledger.committed, time.perf_counter()
    retired, idle, host = figures.retired, figures.idle_ns, engine.stats().host_s
    while ledger.committed < first + STEPS:
        engine.turn()
    launches, took = ledger.committed - first, time.perf_counter() - begun
    measured = Measured(
        step_us=took / launches * 1e6,
        idle_us=(figures.idle_ns - idle) / max(1, figures.retired - retired) / 1e3,
        host_us=(engine.stats().host_s - host) / launches * 1e6,
        overlap_ratio=figures.overlap_ratio,
        nodes=device.graphs.nodes(device.launch_key(rows, Form.PLAIN)),
    )
    links.inbox.append((1, m.Abort(1, (), True)))
    while len(engine.registry) or ledger.in_flight:
        engine.turn()
    device.close()
    return measured


def floor_us(model: Decoder, rows: int) -> float:
    """The bytes of one step, weights and KV at the mean context, over BANDWIDTH."""
    config = model.config
    matrices = model.num_parameters + (0 if config.tie_word_embeddings else -config.vocab_size * config.hidden_size)
    context = PROMPT + WARM_STEPS + STEPS / 2
    kv_bytes = rows * context * memory_of(model.weights.layers).bytes_kept(1, torch.bfloat16).block
    return (matrices * 2 + kv_bytes) / BANDWIDTH * 1e6


def make_model(name: str) -> Decoder:
    """The bundled model, or random weights of a shape."""
    device, kernels = torch.device("cuda"), TritonKernelSet()
    if name == BUNDLED:
        return load_model(ROOT / "runtime" / "models" / "bundled", device, None, "auto", kernels)
    config = SHAPES[name]
    return Decoder(config, dummy_weights(config, config.dtype, device, kernels.pack_weight), kernels)


def run_times(names: Sequence[str], batches: Sequence[int], depths: Sequence[int], temperature: float) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, context {PROMPT}+, {STEPS} launches")
    print("model    rows depth   step_us  floor_us  idle_us  host_us  overlap  nodes")
    for name in names:
        model = make_model(name)
        for rows in batches:
            for depth in depths:
                found = steady_decode(model, rows, depth, temperature)
                print(
                    f"{name:7s} {rows:5d} {depth or 'serial':>6} {found.step_us:9.1f} {floor_us(model, rows):9.1f}"
                    f" {found.idle_us:8.1f} {found.host_us:8.1f} {found.overlap_ratio:8.3f} {found.nodes:6d}",
                    flush=True,
                )
        del model
        torch.cuda.empty_cache()


def run_tests() -> int:
    import pytest

    kernels = sorted(str(path) for path in (ROOT / "tests" / "kernels").glob("test_*triton*.py"))
    return int(
        pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-o", "timeout=300", str(ROOT / "tests/gpu"), *kernels])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["test", "time"], default=["test", "time"])
    parser.add_argument("--models", default="bundled,1B", help=f"of {BUNDLED}, {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--depths", default="0,1,2", help="0 is serial")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA GPU: nothing to check")
        return 0
    status = run_tests() if "test" in arguments.what else 0
    if "time" in arguments.what:
        run_times(
            arguments.models.split(","),
            [int(rows) for rows in arguments.rows.split(",")],
            [int(depth) for depth in arguments.depths.split(",")],
            arguments.temperature,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
