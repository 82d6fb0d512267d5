"""A launch's kernels: what each is for, and how long it took."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.floors import step_bytes
from benchmarks.gpu_table.kernel_roles import OTHER, PRODUCT, role_of, roles_of
from benchmarks.gpu_table.kernel_times import Ran, breakdown, read_trace
from benchmarks.gpu_table.shapes import SHAPES

BYTES = step_bytes(SHAPES["tiny"].described(), torch.bfloat16)
LAYERS = BYTES.layers
BEFORE = ["_start_kernel", "_scan_kernel", "_advance_kernel", "_sampled_kernel", "_apply_plan_kernel", "_embed_kernel"]
LAYER = [
    "_row_product_kernel",
    "_rotate_and_write_kernel",
    "_split_kernel",
    "_combine_kernel",
    "_row_product_kernel",
    "_rms_norm_kernel",
    "_row_product_kernel",
    "_gated_mul_kernel",
    "_row_product_kernel",
    "_rms_norm_kernel",
]
LAUNCH = [
    *BEFORE,
    "_rms_norm_kernel",
    *LAYER * LAYERS,
    "_row_product_kernel",
    "Memcpy DtoD",
    "_finite_kernel",
    "_ended_kernel",
]


def test_products_that_share_a_name_are_told_apart_by_their_places() -> None:
    roles = roles_of(LAUNCH, LAYERS)
    layer = ["qkv", "rotary", "attention", "attention", "o", "norm", "gate_up", "activation", "down", "norm"]
    before = ["marks", "sampling", "sampling", "marks", "apply", "embedding"]
    assert roles == [*before, "norm", *layer * LAYERS, "head", "copy", "finite", "marks"]


def test_kernels_of_recurrent_states_and_experts_are_told_by_their_names() -> None:
    names = [
        "_mamba2_decode_kernel",
        "_delta_decode_kernel",
        "_convolve_kernel",
        "_gated_norm_kernel",
        "_expert_product_kernel",
        "_route_kernel",
    ]
    assert [role_of(name) for name in names] == ["states"] * 4 + ["experts"] * 2


def test_products_of_several_names_are_told_apart_too() -> None:
    """As the vendor's library picks another kernel for another shape, and adds up parts in a kernel of its own."""
    layer = [
        "nvjet_sm90_tst_64x8",
        "_split_kernel",
        "nvjet_sm90_tst_128x8",
        "splitKreduce_kernel",
        "cutlass_gemm",
        "gemm2",
    ]
    roles = roles_of(["_embed_kernel", *layer * 3, "nvjet_sm90_tss"], 3)
    assert roles == ["embedding", *["qkv", "attention", "o", "other", "gate_up", "down"] * 3, "head"]


def test_fused_kernels_are_known_by_their_names() -> None:
    names = ["norm_qkv_kernel", "decode_attention_kernel", "o_residual_kernel", "norm_gate_up_silu", "down_residual"]
    assert [role_of(name) for name in names] == ["qkv", "attention", "o", "gate_up", "down"]
    assert role_of("final_norm_lm_head") == "head"
    assert role_of("a_kernel_of_tomorrow") == OTHER


def test_a_layer_with_more_products_than_it_should_have_is_not_guessed_at() -> None:
    layer = ["gemm1", "gemm2", "gemm3", "gemm4", "gemm5", "_split_kernel"]
    roles = roles_of(["_embed_kernel", *layer * 2, "_finite_kernel"], 2)
    assert roles == ["embedding", *[*[PRODUCT] * 5, "attention"] * 2, "finite"]


def test_times_are_added_up_by_kernel_and_by_kind_of_work() -> None:
    ran = [Ran(name, at, 2.0) for at, name in enumerate(LAUNCH * 3)]
    found = breakdown(ran, 3, 100.0, "tiny", 4, 672.0, BYTES)
    assert sum(kernel.total_us for kernel in found.kernels) == pytest.approx(2.0 * len(LAUNCH))
    assert sum(kernel.share for kernel in found.kernels) == pytest.approx(1.0)
    (qkv,) = [kernel for kernel in found.kernels if kernel.role == "qkv"]
    assert (qkv.name, qkv.count, qkv.mean_us, qkv.total_us) == ("_row_product_kernel", LAYERS, 2.0, 2.0 * LAYERS)
    roles = {role.role: role for role in found.roles}
    assert roles["attention"].total_us == 4.0 * LAYERS
    assert roles["attention"].floor_us == BYTES.role_floor_us("attention", 4 * 672.0)
    assert roles["norm"].floor_us is None


def test_what_kernels_add_to_a_step_is_the_step_however_much_they_run_side_by_side() -> None:
    """_embed_kernel begins while _apply_plan_kernel runs and ends 1 us behind it; _scan_kernel ends within the first;
    the device is idle for 3 us before _sampled_kernel."""
    ran = [Ran("_apply_plan_kernel", 10.0, 5.0), Ran("_embed_kernel", 11.0, 5.0), Ran("_scan_kernel", 12.0, 1.0),
           Ran("_sampled_kernel", 19.0, 2.0)]  # fmt: skip
    found = breakdown(ran, 1, 11.0, "tiny", 1, 672.0, BYTES)
    adds = {kernel.name: kernel.own_us for kernel in found.kernels}
    assert adds == {"_apply_plan_kernel": 5.0, "_embed_kernel": 1.0, "_scan_kernel": 0.0, "_sampled_kernel": 5.0}
    by_role = {role.role: role.own_us for role in found.roles}
    assert by_role == {"apply": 5.0, "marks": 5.0, "embedding": 1.0, "sampling": 0.0}
    assert sum(kernel.total_us for kernel in found.kernels) == 13.0


def test_launches_that_differ_are_told_by_names_alone() -> None:
    ran = [Ran(name, at, 1.0) for at, name in enumerate([*LAUNCH, *LAUNCH[:-1], "Memset"])]
    roles = {role.role for role in breakdown(ran, 2, 100.0, "tiny", 1, 672.0, BYTES).roles}
    assert PRODUCT in roles and not roles & {"qkv", "o", "gate_up", "down", "head"}


def test_nothing_seen_is_no_breakdown() -> None:
    with pytest.raises(BenchmarkError, match="no kernel"):
        breakdown([], 20, 100.0, "tiny", 1, 672.0, BYTES)


def test_of_a_trace_only_what_ran_on_the_device_counts_in_its_order() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "second", "ts": 20.5, "dur": 1.25},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 5},
            {"ph": "X", "cat": "gpu_memcpy", "name": "first", "ts": 10, "dur": 2},
            {"ph": "M", "name": "process_name"},
            {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 11},
        ]
    }
    assert read_trace(trace) == [Ran("first", 10, 2), Ran("second", 20.5, 1.25)]
