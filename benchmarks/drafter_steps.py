"""What the steps of a draft head take on this GPU, beside the time in which its matrices are read:
`python -m benchmarks.drafter_steps`.

Bare graphs, of random weights of a shape and a head as wide: K steps in turn, as apply has them, of rows of some
length; and what a head adds to an F of as many rows, one query token each. A step's goal is 1.3 times its floor, the
matrices' bytes over what an H200 reads in a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import torch

from benchmarks.gpu_table.heads import heads_like, step_bytes
from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.tune.trial import READ_BYTES_PER_S, graph_us
from runahead.cuda_graphs.cuda_device import allocate_mapped_rings
from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.kernels.triton.kernel_set import TritonKernelSet
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.weights import dummy_weights
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.triton import TritonProgram
from runahead.runtime.programs.triton_head import TritonHead

LENGTH: Final = 512  # tokens of a row
CONTEXT: Final = 1024
BLOCK_SIZE: Final = 16
GOAL: Final = 1.3
_EACH: Final = CONTEXT // BLOCK_SIZE  # blocks of a row
_TIMES: Final = 20


def program_of(model: Decoder, head: TritonHead, rows: int, drafts: int, exact: bool) -> TritonProgram:
    """With so many rows of LENGTH tokens."""
    rings = allocate_mapped_rings(RingLayout(4, PLAN_WORDS, 1 << 12, rows, 4, drafts, rows * (1 + drafts)))
    program = TritonProgram(
        model, rings, max_rows=rows, max_tokens=rows, num_blocks=rows * _EACH + 1, block_size=BLOCK_SIZE,
        context_length=CONTEXT, drafts=drafts, draft_rows=rows, exact=exact, head=head,
    )  # fmt: skip
    state, slots = program.rows.state, torch.arange(rows, device=model.device)
    state.alive[:rows] = True
    state.seq_len[:rows] = LENGTH
    state.max_position[:rows] = CONTEXT - 1
    state.block_table[:rows] = 1 + slots[:, None] * _EACH + torch.arange(_EACH, device=model.device)
    program.rows.rows.slots[:rows] = slots.int()
    return program


def measure(model: Decoder, head: TritonHead, rows: int, drafts: int, exact: bool) -> tuple[float, float]:
    """Microseconds of a step, and of what F does for the head."""
    program = program_of(model, head, rows, drafts, exact)
    device_rows, follower = program.rows, program._head
    assert device_rows.guess is not None and follower is not None
    batch = device_rows.batch(rows, rows, True)
    batch.positions.fill_(LENGTH - 1)
    batch.seq_lens.fill_(LENGTH)
    batch.block_tables[:, :_EACH] = device_rows.state.block_table[:rows]
    last = batch.block_tables[:, (LENGTH - 1) // BLOCK_SIZE].long() * BLOCK_SIZE
    batch.slot_mapping.copy_(last + (LENGTH - 1) % BLOCK_SIZE)
    hidden = torch.randn((rows, model.config.hidden_size), device=model.device, dtype=model.dtype)
    _, seen = follower.looking(rows)
    if seen is not None:
        seen.normal_()

    def steps() -> None:
        assert device_rows.guess is not None
        for _ in range(_TIMES):
            device_rows.guess(rows, drafts)

    def follow() -> None:
        for _ in range(_TIMES):
            follower.follow(batch, batch, hidden, seen)

    return graph_us(steps) / _TIMES / drafts, graph_us(follow) / _TIMES


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="0.6B,8B", help="shapes of the benchmarks")
    parser.add_argument("--heads", default="eagle-1,eagle-3,mtp", help="kinds of heads")
    parser.add_argument("--rows", default="1,8,32", help="of a launch")
    parser.add_argument("--drafts", type=int, default=3, help="of a row, 1 to 7 (3)")
    parser.add_argument("--exact", action="store_true", help="by the exact kernels")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda")
    for name in chosen.models.split(","):
        with torch.inference_mode():
            config, kernels = SHAPES[name].described(), TritonKernelSet(chosen.exact)
            weights = dummy_weights(config, torch.bfloat16, device, kernels.pack_weight, 0)
            model = Decoder(config, weights, kernels, CONTEXT)
            heads = heads_like(
                model,
                lambda outputs, depth: torch.randn((outputs, depth), device=device, dtype=torch.bfloat16) * 0.02,
            )
            for kind in chosen.heads.split(","):
                floor = step_bytes(heads[kind], model) / READ_BYTES_PER_S * 1e6
                head = TritonHead(heads[kind], model, chosen.exact, CONTEXT)
                for rows in map(int, chosen.rows.split(",")):
                    step, follow = measure(model, head, rows, chosen.drafts, chosen.exact)
                    verdict = "met" if step <= GOAL * floor else "MISSED"
                    print(
                        f"{name}, {kind}, {rows} rows: a step {step:.1f} us, floor {floor:.1f}, ratio "
                        f"{step / floor:.2f} (goal {GOAL:g}: {verdict}); in F {follow:.1f} us",
                        flush=True,
                    )
        del model, heads, head, weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
