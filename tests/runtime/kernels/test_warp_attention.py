"""Attention by groups of warps: the kernel's own code with emulated words, against a loop over rows in float64. Every
free block and tail is NaN; and the same code compiled for compute capability 9.0."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import TOLERANCE, relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import AttentionShape  # noqa: E402
from runahead.runtime.kernels.triton.attention import hopper_copies, prefill_hopper, prefill_schedule  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill import prefill_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_schedule import cut_chunks  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan  # noqa: E402
from tests.runtime.kernels import emulated_gluon  # noqa: E402
from tests.runtime.kernels.test_triton_attention import attention_of, paged  # noqa: E402
from tests.runtime.kernels.test_triton_line_attention import batch_of, random_queries  # noqa: E402

WHOLE = ChunkPlan(lines=128, keys=64, programs=3, warps=8, stages=2, copiers=1)
KERNEL: Any = prefill_hopper.groups_kernel
LENGTHS, QUERIES = [200, 1, 0, 170, 300], [70, 1, 1, 1, 45]


class Emulated:
    """In the place of the kernel, with which it shares nothing but its code."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, num_warps: int, **options: Any) -> None:
            assert num_warps == 4
            emulated_gluon.run((prefill_schedule, hopper_copies, prefill_hopper), KERNEL, grid[0], arguments, options)

        return launch


def test_who_has_no_such_plan_needs_no_gluon() -> None:
    """It is an experiment of Triton's, and any later version may call its parts otherwise."""
    without = "import sys; sys.modules['triton.experimental.gluon.language.nvidia.hopper'] = None; "
    for module, is_served in (("programs.cuda.program", True), ("kernels.triton.attention.prefill_hopper", False)):
        command = [sys.executable, "-c", f"{without}import runahead.runtime.{module}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode == 0) == is_served, done.stderr


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel itself runs: tests/gpu")
@pytest.mark.parametrize(
    ("plan", "window", "heads", "block_size"),
    [
        (WHOLE, 0, 4, 16),
        (replace(WHOLE, keys=128, stages=3), 20, 4, 16),
        (replace(WHOLE, stages=4), 0, 6, 8),
        (WHOLE, 100, 4, 64),
    ],
    ids=["whole", "window", "wide heads", "large blocks"],
)
def test_chunks_and_decode_rows_together(
    monkeypatch: pytest.MonkeyPatch, plan: ChunkPlan, window: int, heads: int, block_size: int
) -> None:
    monkeypatch.setattr(prefill_hopper, "groups_kernel", Emulated())
    torch.manual_seed(3)
    dim = 128 if plan.stages == 4 else 64
    kv = paged(LENGTHS, 2, dim, block_size, 512 // block_size, torch.bfloat16)
    q = random_queries(sum(QUERIES), heads, dim, torch.bfloat16)
    batch = batch_of(kv, QUERIES)
    work = cut_chunks(batch, AttentionShape(heads, 2, dim, dim**-0.5), plan)
    out = prefill_attention(q, kv.keys, kv.values, batch, dim**-0.5, window, plan, work)
    first = 0
    for row, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        found = out[first : first + count]
        if length:
            expected = torch.stack(
                [attention_of(kv, row, q[first + i], length - count + i, dim**-0.5, window) for i in range(count)]
            )
            assert relative_error(found, expected) < TOLERANCE[torch.bfloat16], row
        else:
            assert not found.any(), "a masked row gets zeros"
        first += count
