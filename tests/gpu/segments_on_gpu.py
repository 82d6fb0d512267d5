"""The definition of several ranks' tokens: one process that computes the segments of a model on one GPU, in turn.

`python -m tests.gpu.segments_on_gpu` prints JSON: by place of a request of `tests.gpu.engine_on_gpus`, its tokens.
Behind it, MODEL is a name of `divided_models`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from runahead.cuda_graphs.cuda_device import allocate_mapped_rings
from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.ranks import Ranks
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.models.load import load_model
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.cuda.program import TritonProgram
from runahead.runtime.rounding import ceil_div
from tests.gpu.divided_models import saved
from tests.gpu.engine_on_gpus import CHUNK, LENGTHS, TOKENS, prompt, sampling
from tests.gpu.exchanges_on_gpus import RANKS
from tests.runtime.kernels.divided_programs import Divided
from tests.runtime.launches import Launches

BLOCK_SIZE: Final = 16
PLACES: Final = (0, 1, 3)  # without penalties, and with prompts that one launch takes
MOST: Final = max(LENGTHS[place] for place in PLACES)
EACH: Final = -(-(MOST + TOKENS) // BLOCK_SIZE)  # KV blocks


def make_rings() -> Any:
    return allocate_mapped_rings(RingLayout(4, PLAN_WORDS, 1 << 16, len(PLACES), 4))


def program_of(served: Mapping[str, Any], ranks: Ranks, rings: Any) -> TritonProgram:
    """A segment's program. served: as `divided_models.saved`."""
    checkpoint, load_format = open_checkpoint(Path(served["model"])), served.get("load_format", "auto")
    kernels, device = TritonKernelSet(), torch.device("cuda", 0)
    context = EACH * BLOCK_SIZE
    model = load_model(checkpoint, device, torch.bfloat16, load_format, kernels, None, context, None, ranks)
    return TritonProgram(
        model, rings, max_rows=len(PLACES), max_tokens=MOST, num_blocks=len(PLACES) * EACH + 1, block_size=BLOCK_SIZE,
        context_length=context,
    )  # fmt: skip


@torch.inference_mode()
def tokens(served: Mapping[str, Any]) -> dict[int, list[int]]:
    first = make_rings()
    rings = [first, *(replace(make_rings(), plan=first.plan, bulk=first.bulk) for _ in range(1, RANKS))]
    divided = Divided(rings, partial(program_of, served), is_on_gpu=True)
    vocab = int(open_checkpoint(Path(served["model"])).config()["vocab_size"])
    keeps_states = "state_snapshot_blocks" in served
    launches = Launches(divided.run, first, vocab, EACH, 0 if keeps_states else None)
    found = {}
    for slot, place in enumerate(PLACES):
        launches.begin(slot, prompt(place).tolist(), sampling(place))
        for _ in range(ceil_div(LENGTHS[place], CHUNK)):
            launches.launch({slot: CHUNK})
        found[place] = launches.decode([slot], TOKENS)[slot]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(msgspec.json.encode(tokens(saved((*sys.argv, "dense")[1], Path(made)))).decode(), flush=True)
