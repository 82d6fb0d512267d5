"""Kernels that may start while the one before them runs: what they read and write before they wait.

No tool sees such a race. So, in Triton's interpreter, everything that a predecessor makes is NaN until a kernel waits,
and nothing that the kernel writes may have changed by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.choice import Choice  # noqa: E402
from runahead.runtime.kernels.layers import Linear, Norm, SharedExpert  # noqa: E402
from runahead.runtime.kernels.triton.attention import decode as decode_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan, begin_decode  # noqa: E402
from runahead.runtime.kernels.triton.attention.split_kv import make_part_buffers  # noqa: E402
from runahead.runtime.kernels.triton.forward import decode as decode_streams  # noqa: E402
from runahead.runtime.kernels.triton.forward import unfused_products  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.kernels.triton.gemm import small_batch_gemm, warp_split_k  # noqa: E402
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, STORE  # noqa: E402
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual, SplitScratch  # noqa: E402
from runahead.runtime.kernels.triton.gemm.tuning import Tiling  # noqa: E402
from runahead.runtime.kernels.triton.moe import grouped_gemm, routing, sums, tuning  # noqa: E402
from runahead.runtime.kernels.triton.moe.grouped_gemm import LoneToken  # noqa: E402
from runahead.runtime.kernels.triton.ops import norms  # noqa: E402
from runahead.runtime.kernels.triton.recurrent import (  # noqa: E402
    gated_delta_decode,
    mamba2_decode,
)
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels import recurrent_mixers  # noqa: E402
from tests.runtime.kernels import test_triton_decode_attention as attention  # noqa: E402
from tests.runtime.kernels import test_triton_decode_streams as streams  # noqa: E402
from tests.runtime.kernels.predecessor import NAN, check  # noqa: E402
from tests.runtime.kernels.recurrent_batches import Row, batch_of  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter runs one program after the other")
DEPTH, OUTPUTS = 128, 64
ONE_GROUP = next(shape for shape in recurrent_mixers.MAMBA2 if shape.groups == 1)


def random_linear(epilogue: int) -> Linear:
    return Linear(torch.randn(OUTPUTS * (2 if epilogue == GATED else 1), DEPTH) * DEPTH**-0.5, None)


@pytest.mark.parametrize("epilogue", [STORE, ADD, GATED])
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(32, 64, 1, 2, 4, False, False),
        Tiling(32, 64, 2, 1, 4, True, False),
        Tiling(32, 64, 2, 1, 2, 0, False, direct=True),
    ],
)
def test_a_product_of_a_few_rows(monkeypatch: pytest.MonkeyPatch, epilogue: int, tiling: Tiling) -> None:
    torch.manual_seed(2)
    rows, linear, norm = 3, random_linear(epilogue), Norm(torch.rand(OUTPUTS), 1e-5)
    x, squares = torch.randn(rows, DEPTH), torch.rand(4, 8, dtype=torch.float64)
    residual = Residual(
        torch.randn(rows, OUTPUTS), torch.full((rows, OUTPUTS), NAN), torch.full((2, 8), NAN, dtype=torch.float64)
    )
    scratch = SplitScratch(torch.full((1 << 15,), NAN), torch.zeros(8, dtype=torch.int32))

    def run() -> None:
        small_batch_gemm.small_batch_product(
            x, linear, residual.values, epilogue, tiling, scratch, rows, norm=norm, residual=residual,
            squares=None if epilogue == ADD else (squares, 4, 1e-5),
        )  # fmt: skip

    written = [residual.values, residual.scaled, scratch.partial]
    programs = OUTPUTS // tiling.rows * (1 if tiling.direct else tiling.splits)
    kernel = warp_split_k if tiling.direct else small_batch_gemm
    made = [x, squares, *([residual.values] if epilogue == ADD else [])]
    check(monkeypatch, kernel, made, written, run, programs)


def test_the_final_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, found = torch.randn(3, DEPTH), torch.rand(DEPTH), torch.empty(3, DEPTH)

    def run() -> None:
        found.copy_(norms.rms_norm(x, weight, 1e-5))

    check(monkeypatch, norms, [x], [found], run, 3)


@pytest.mark.parametrize(("together", "programs"), [(False, 5 + 8), (True, 1)])  # a token's each, an expert's each
def test_what_sends_tokens_to_experts(monkeypatch: pytest.MonkeyPatch, together: bool, programs: int) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(routing, "_TOGETHER", 16 * together)
    scores, squares, shares = torch.randn(5, 8), torch.rand(4, 8, dtype=torch.float64), torch.full((10,), NAN)
    given = scores, torch.ones(5, dtype=torch.int32), Choice(2, True), torch.zeros(1, dtype=torch.int32)

    def run() -> None:
        shares.copy_(routing.route(*given, squares=(squares, 4, 1e-5), depth=64).routing_weights)

    check(monkeypatch, routing, [scores, squares], [shares], run, programs)


def test_what_lists_the_tokens_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    places = torch.tensor([[0, -1, 1], [-1, 0, 1], [0, 1, -1]], dtype=torch.int8)
    entries, items = torch.full((3, 3), 99, dtype=torch.int32), torch.full((6, 4), 99, dtype=torch.int32)
    counts, arrived = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def run() -> None:
        routing._list_kernel[(3,)](  # not through `route`, which makes the places itself
            places, entries, counts, items, arrived, 3, 6, COUNT=3, CHOSEN=2, PADDED=16, LISTED=16,
            BLOCK=16, DEPENDENT=False,
        )  # fmt: skip

    check(monkeypatch, routing, [places], [entries, items], run, 3)
    assert entries[0, :2].tolist() == [0, 4]


def test_the_products_and_the_sum_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    live, arrived = torch.ones(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    routed = routing.route(torch.randn(3, 5), live, Choice(2, renormalised=True), arrived)
    x, weight, results = torch.randn(3, DEPTH), torch.randn(5, 2 * OUTPUTS, DEPTH), torch.full((6, OUTPUTS), NAN)

    def multiply() -> None:
        grouped_gemm.expert_product(x, weight, routed, 2, results, tuning.FIRST_GATED)

    check(monkeypatch, grouped_gemm, [x], [results], multiply, len(routed.items) * OUTPUTS // 32)
    multiply()
    residual, scaled = torch.randn(3, OUTPUTS), torch.full((3, OUTPUTS), NAN)
    squares, gamma = torch.full((1, 8), NAN, dtype=torch.float64), torch.rand(OUTPUTS)

    def add() -> None:
        sums.expert_sums(results, live, 2, residual, added=True, gamma=gamma, scaled=scaled, squares=squares)

    check(monkeypatch, sums, [results, residual], [residual, scaled, squares], add, 3)


def random_shared_expert(width: int, depth: int) -> SharedExpert:
    first, last = torch.randn(2 * width, depth) * depth**-0.5, torch.randn(depth, width) * width**-0.5
    return SharedExpert(Linear(first, None), Linear(last, None), torch.randn(depth))


@pytest.mark.parametrize("width", [0, 96])
def test_products_of_a_lone_row_s_experts(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Both products wait. width: of the shared expert, whose last piece is less deep; 0: there is none."""
    torch.manual_seed(3)
    x, scores, live = torch.randn(1, DEPTH), torch.randn(1, 6 if width else 5), torch.ones(1, dtype=torch.int32)
    token = LoneToken(scores, live, Choice(2, True), torch.rand(4, 8, dtype=torch.float64), 4, 1e-5)
    gate_up, down, routed = torch.randn(5, 2 * OUTPUTS, DEPTH) * 0.1, torch.randn(5, DEPTH, OUTPUTS), token.unrouted()
    routed.items.fill_(-1)
    between, results = torch.full((2, OUTPUTS), NAN), torch.full((2, DEPTH), NAN)
    of_first, of_last = torch.full((1, width), NAN), torch.full((1, -(-width // OUTPUTS), DEPTH), NAN)
    first = last = None
    if width:
        shared = random_shared_expert(width, DEPTH)
        first = grouped_gemm.SharedProduct(shared.gate_up, width, x, of_first)
        last = grouped_gemm.SharedProduct(shared.down, width, of_first, of_last, scores)

    def multiply() -> None:
        grouped_gemm.expert_product(x, gate_up, routed, 2, between, tuning.FIRST_GATED, shared=first, lone=token)

    items, written = 2 + -(-width // OUTPUTS), [between, of_first, routed.items, routed.routing_weights]
    check(monkeypatch, grouped_gemm, [x, scores, token.squares], written, multiply, items * OUTPUTS // 32)
    multiply()

    def go_on() -> None:
        grouped_gemm.expert_product(between, down, routed, 2, results, tuning.LAST, shared=last, lone=token)

    made = [between, of_first, routed.items, routed.routing_weights]
    check(monkeypatch, grouped_gemm, made, [results, of_last], go_on, items * DEPTH // 64)


@pytest.mark.parametrize("plan", [replace(plan, programs=some) for plan in attention.PLANS for some in (5, 70)])
def test_attention(monkeypatch: pytest.MonkeyPatch, plan: AttentionPlan) -> None:
    """Older keys and values may be read before the wait; the cell of the newest token holds NaN until it is written.
    Programs without an item end at once."""
    torch.manual_seed(4)
    lengths = [40, 0, 17, 33]
    rows = attention.make_rows(lengths, attention.SHAPES[0], torch.float32, normed=True)
    windows = torch.zeros(1, dtype=torch.int32)
    work = begin_decode(
        torch.zeros(4, dtype=torch.int64), torch.randn(2, 16), torch.empty(4, 16), rows.seq_lens, windows, plan
    )
    buffers = make_part_buffers(4, rows.weights.shape, plan, attention.CONTEXT, DEVICE)
    out = torch.full((4, rows.weights.shape.q_size), NAN)

    def run() -> None:
        decode_attention.decode_attention(
            rows.qkv, out, rows.keys, rows.values, rows.tables, rows.seq_lens, work.items[0], work.total[0], rows.rope,
            rows.weights, plan, buffers, dependent=False,
        )  # fmt: skip

    busy = min(plan.programs, rows.weights.shape.kv_heads * int(work.total[0, 0]))
    check(monkeypatch, decode_attention, [rows.qkv], [out, rows.keys, rows.values, buffers.partial], run, busy)


def decode_of(module: Any, shape: Any) -> tuple[Callable[..., Any], int]:
    """A mixer's function for decode rows, and its heads."""
    if module is gated_delta_decode:
        return module.delta_of_decode_rows, shape.value_heads
    return module.mamba2_of_decode_rows, shape.heads


@pytest.mark.parametrize(
    ("shape", "how", "rows"),
    [
        (recurrent_mixers.MAMBA2[1], "normed", 3),
        (ONE_GROUP, "with squares", 3),
        (ONE_GROUP, "with squares", 1),
        (recurrent_mixers.DELTA[1], "normed", 3),
    ],
    ids=["Mamba-2", "Mamba-2 with squares", "Mamba-2 of a lone row", "a delta net"],
)
def test_a_recurrent_mixer_may_ask_for_its_states(
    monkeypatch: pytest.MonkeyPatch, shape: Any, how: str, rows: int
) -> None:
    module: Any = gated_delta_decode if shape in recurrent_mixers.DELTA else mamba2_decode
    mixer, squares = recurrent_mixers.mixer_of(shape), torch.full((shape.inner, 8), NAN, dtype=torch.float64)
    parts: dict[str, Any] = {"squares": squares} if how == "with squares" else {}
    batch = batch_of([Row(2, 7, 1), Row(0, 0, 1), Row(3, 5, 1, alive=False)][:rows])
    projected, states = recurrent_mixers.drawn(rows, shape), recurrent_mixers.held_states(mixer)
    arrived, out = torch.zeros(16, dtype=torch.int32), torch.full((rows, shape.inner), NAN)
    states = recurrent_mixers.with_runs(mixer, states, 0)
    of, heads = decode_of(module, shape)

    def run() -> None:
        of(projected, mixer, states, batch, out, arrived, dependent=False, **parts)

    check(monkeypatch, module, [projected], [out, squares, *states], run, rows * heads)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize(
    ("shape", "module"),
    [
        (recurrent_mixers.MAMBA2[1], mamba2_decode),
        pytest.param(recurrent_mixers.DELTA[1], gated_delta_decode, marks=pytest.mark.large),
    ],
)
def test_a_recurrent_mixer_may_ask_for_its_states_where_rows_have_drafts(
    monkeypatch: pytest.MonkeyPatch, shape: Any, module: Any
) -> None:
    mixer: Any = recurrent_mixers.mixer_of(shape)
    rows = [Row(2, 7, 2, drafts=1, replayed=2, left_in=4, left_after=1), Row(0, 3, 1), Row(3, 5, 1, alive=False)]
    projected, states = recurrent_mixers.drawn(4, shape), recurrent_mixers.held_states(mixer)
    states = (*states, torch.randn(len(states[0]), 2, mixer.keeps.inputs))
    arrived, out = torch.zeros(16, dtype=torch.int32), torch.full((4, shape.inner), NAN)
    of, heads = decode_of(module, shape)

    def run() -> None:
        of(projected, mixer, states, batch_of(rows), out, arrived, dependent=False)

    check(monkeypatch, module, [projected], [out, *states], run, 3 * heads)


@pytest.mark.parametrize(("rows", "chunk"), [(1, 0), (3, 0), (3, 4)])
def test_the_first_product_of_f_is_launched_as_usual_and_the_others_dependently(
    monkeypatch: pytest.MonkeyPatch, rows: int, chunk: int
) -> None:
    """With a chunk of a prompt as the last row too. chunk: its query tokens; 0: all rows decode."""
    launched: list[bool] = []

    def note(name: str, dependent_of: Callable[..., bool], module: Any = decode_streams) -> None:
        original = getattr(module, name)

        def launch(*given: Any, **options: Any) -> Any:
            launched.append(dependent_of(given, options))
            if "dependent" in options:
                options["dependent"] = False
            alone = [replace(one, dependent=False) if hasattr(one, "block") else one for one in given]
            return original(*alone, **options)

        monkeypatch.setattr(module, name, launch)

    for module, name in (
        (decode_streams, "small_batch_product"),
        (unfused_products, "small_batch_product"),
    ):
        note(name, lambda given, options: next(one.dependent for one in given if hasattr(one, "block")), module)
    for module in (decode_streams, unfused_products):
        monkeypatch.setattr(module, "dependent_launch_works", lambda: True)
    note("decode_attention", lambda given, options: options["dependent"])
    note("rms_norm", lambda given, options: options["dependent"], norms)
    config = gpu_chain.small_config(intermediate_size=128)
    model = streams.decoder(config, TritonKernelSet(), streams.HALF)
    batch = streams.batch_of([5] * rows, 1, DEVICE)
    if chunk:
        decodes = [True] * (rows - 1) + [False]
        batch = streams.ragged_batch([5] * rows, [1] * (rows - 1) + [chunk], decodes, DEVICE)
    hidden = model.forward(batch, model.make_cache(rows * streams.BLOCKS_A_ROW + 1, streams.BLOCK_SIZE))
    logits, places = torch.empty(rows, config.vocab_size), torch.arange(rows, dtype=torch.int32)
    model.kernels.logits_into(hidden[:rows], model.weights.lm_head, logits, places)
    norm_and_head = 2
    assert launched == [False] + [True] * (5 * config.num_layers - 1 + norm_and_head)
