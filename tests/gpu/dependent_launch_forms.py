"""Decode steps of a model's real shapes, with dependent launch in one of several forms: a process of its own, since
what is compiled hangs on the form. `python -m tests.gpu.dependent_launch_forms FORM` prints what the steps came to.

A kernel that reads or writes before it may does so unseen where the kernel before it happens to be quick. So there is a
form in which every kernel lets the next one start and then does nothing for a while.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl

from benchmarks.gpu_table.shapes import SHAPES
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.forward import decode, unfused_products
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.kernels.triton.gpu import pdl
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.weights import dummy_weights

FORMS: Final = ("off", "late", "early", "slow")
ROWS: Final = (1, 7, 16, 31, 64)  # one of each number of columns that the products' tilings know
STEPS, REPLAYS = 3, 6  # in a graph, and of the graph
LENGTH, BLOCK_SIZE, BLOCKS = 90, 16, 12  # tokens of the longest row at first; blocks of each row
_IDLE_NS = tl.constexpr(20_000)


@triton.jit
def start_and_idle(DEPENDENT: tl.constexpr) -> None:
    """Those after may start; this program comes late."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        begin = tl.extra.cuda.globaltimer()
        now = begin
        while now - begin < _IDLE_NS:
            now = tl.extra.cuda.globaltimer()


@triton.jit
def nothing_yet(DEPENDENT: tl.constexpr) -> None:
    """Those after must not start."""


@triton.jit
def wait_then_start(DEPENDENT: tl.constexpr) -> None:
    """Those after may start when all before have ended."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def take(form: str) -> int:
    """Give the kernels this form, before any has been compiled. Returns how many modules have such kernels."""
    kernels = [
        vars(module)
        for name, module in sys.modules.items()
        if name.startswith("runahead.runtime.kernels.triton.") and hasattr(module, "let_dependents_start")
    ]
    for module in kernels:
        if form == "slow":
            module["let_dependents_start"] = start_and_idle
        if form == "late":
            module["let_dependents_start"], module["wait_for_predecessors"] = nothing_yet, wait_then_start
    if form == "off":
        for where in (decode, unfused_products):
            vars(where)["dependent_launch_works"] = lambda: False
    return sum(module["__name__"] != pdl.__name__ for module in kernels)


def steps(rows: int) -> str:
    """A digest of the tokens, logits, keys and values of steps that follow each other, within a graph and over the
    borders of graphs."""
    device, kernels = torch.device("cuda"), TritonKernelSet()
    torch.manual_seed(rows)
    config = replace(SHAPES["0.6B"].described(), num_layers=3, vocab_size=2048)
    weights = dummy_weights(config, torch.bfloat16, device, kernels.pack_weight)
    model = Decoder(config, weights, kernels, BLOCKS * BLOCK_SIZE)
    cache = model.make_cache(rows * BLOCKS + 1, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    row = torch.arange(rows + 1, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        token_ids=torch.randint(0, config.vocab_size, (rows,), device=device),
        positions=torch.zeros(rows, dtype=torch.int64, device=device),
        slot_mapping=torch.zeros(rows, dtype=torch.int64, device=device),
        query_start_loc=row,
        seq_lens=LENGTH - 7 * row[:rows] % LENGTH,
        block_tables=(torch.randperm(rows * BLOCKS, device=device).int() + 1).view(rows, BLOCKS),
        num_tokens=rows,
        num_rows=rows,
        max_seq_len=BLOCKS * BLOCK_SIZE,
        is_decode=True,
    )
    logits = torch.zeros((rows, config.vocab_size), device=device)
    tokens = torch.zeros((rows, REPLAYS * STEPS), dtype=torch.int64, device=device)
    step = torch.zeros(rows, 1, dtype=torch.int64, device=device)

    def chained() -> None:
        for _ in range(STEPS):
            hidden = model.forward(batch, cache)
            kernels.logits_into(hidden, weights.lm_head, logits, row[:rows])
            batch.token_ids.copy_(logits.argmax(1))
            batch.seq_lens.add_(1)
            tokens.scatter_(1, step, batch.token_ids[:, None])
            step.add_(1)

    before = [tensor.clone() for tensor in (batch.token_ids, batch.seq_lens, *cache.keys, *cache.values)]
    chained()  # compiled, and every buffer made
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained()
    for tensor, at_first in zip((batch.token_ids, batch.seq_lens, *cache.keys, *cache.values), before, strict=True):
        tensor.copy_(at_first)
    step.zero_()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    assert int(step[0]) == REPLAYS * STEPS and bool(logits.isfinite().all())
    found = hashlib.sha256()
    for tensor in (tokens, logits, *cache.keys, *cache.values):
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def main(form: str) -> None:
    assert form in FORMS, form
    print("modules", take(form))
    for rows in ROWS:
        print(rows, steps(rows), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1])
