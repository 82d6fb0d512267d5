"""Every kernel compiles for every kind of GPU that is served, and takes no more shared memory than there is."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu_table.shapes import SHAPES
from tests.project.repository import ROOT
from tests.runtime.kernels.compiled_launches import SHARED_MEMORY, Compiled, Orders
from tests.runtime.kernels.read_elsewhere import read_elsewhere

KERNELS = ROOT / "runtime" / "kernels" / "triton"
MARKS = ROOT / "cuda_graphs" / "marks.py"
# Compute capability, and whether kernels are launched programmatically: they can be from 9.0 on.
TARGETS = [((8, 0), False), ((8, 9), False), ((9, 0), True), ((9, 0), False), ((10, 0), False)]
NAMES = [f"{major}.{minor}{', dependent' if dependent else ''}" for (major, minor), dependent in TARGETS]
# In every run: the GPU with the least shared memory, and the one on which kernels are launched programmatically.
ALWAYS = (((8, 9), False), ((9, 0), True))
SHAPE, ROWS = "0.6B", (1, 8, 72)  # launches in which every kernel has a part
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_hidden_layers": 1}
GEMMA3 = {**OLMO2, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_act": None}
GEMMA2 = {**OLMO2, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": None}
# Feed-forwards and experts without gates; GEMMA2 has scores and logits that a tanh bounds.
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 2,
    "hybrid_override_pattern": "-E",
    "mlp_hidden_act": "relu2",
    "hidden_act": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": None,
    "rope_theta": None,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 512,
}
QWEN3_MOE = {
    **OLMO2,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
# With norms, activations and experts, which the shape's own architecture lacks.
FURTHER = (OLMO2, GEMMA3, QWEN3_MOE, GEMMA2, NEMOTRON_H, {**NEMOTRON_H, "mlp_bias": True})


def compiled(orders: Orders, cache: Path) -> Sequence[Compiled]:
    """What a process of its own has compiled; nothing is found in a cache. Fails with what it said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests.runtime.kernels.compiled_launches", msgspec.json.encode(orders).decode()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{orders}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}", pytrace=False)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Compiled])


def check(found: Sequence[Compiled], capability: tuple[int, int], dependent: bool) -> None:
    """They fit, have no instruction that this GPU does not know, read what they change before any thread does, and
    leave a barrier's memory to the barrier."""
    assert found
    assert [kernel for kernel in found if kernel.unordered] == []
    assert [kernel for kernel in found if kernel.reused] == [], "a barrier's memory holds other data"
    assert [kernel for kernel in found if kernel.shared > SHARED_MEMORY[capability]] == []
    has = {name for kernel in found for name in kernel.has}
    assert ("griddepcontrol.wait" in has) == dependent
    assert capability[0] == 9 or "wgmma" not in has
    assert capability[0] == 10 or "tcgen05" not in has
    direct = [kernel for kernel in found if kernel.kernel == "warp_split_k_kernel"]
    assert [kernel for kernel in direct if "ldmatrix" in kernel.has] == [], "weights go through shared memory"


@cache
def nodes_of_kernels() -> list[ast.AST]:
    """The syntax of all files with kernels, but for ranks and quantized weights: no launch of an unquantized model on
    one GPU has theirs, and other tests run them (`test_triton_fp8_order.py`)."""
    return [
        node
        for path in (*KERNELS.rglob("*.py"), MARKS)
        if path.parent.name != "ranks" and not path.name.startswith(("fp8_", "int4_", "rank_rows"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def launched_kernels(capability: tuple[int, int]) -> set[str]:
    """Names of the functions that are launched on a grid: `name[...](...)`, or `module.name[...](...)`. Those that are
    written in Gluon are for compute capability 9.0."""
    languages = ("triton.jit", "gluon.jit") if capability == (9, 0) else ("triton.jit",)
    nodes = nodes_of_kernels()
    launched = {
        ast.unparse(node.func.value).split(".")[-1]
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    jitted = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any(language in ast.unparse(one) for one in node.decorator_list for language in languages)
    }
    return launched & jitted


def differing_kernels() -> set[str]:
    """Names of the functions whose code differs between GPUs: matrix products use other instructions, and inline
    assembly is not checked before `ptxas`. They contain either, or call a function that does."""
    calls: dict[str, set[str]] = {}
    for node in nodes_of_kernels():
        if isinstance(node, ast.FunctionDef):
            called = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
            calls.setdefault(node.name, set()).update(ast.unparse(one).split(".")[-1] for one in called)
    found = {"dot", "inline_asm_elementwise"}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


# A length that is loaded in two layouts, by one of which it is written.
LENGTHS = """
module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32} {
  tt.func public @kernel(%lengths: !tt.ptr<i32> {tt.divisibility = 16 : i32}, %cells: !tt.ptr<i32>) {
    %at = tt.splat %lengths : !tt.ptr<i32> -> tensor<16x!tt.ptr<i32>, #blocked>
    %at_1 = tt.splat %lengths : !tt.ptr<i32> -> tensor<16x!tt.ptr<i32>, #blocked1>
    %place = tt.addptr %at, %slot : tensor<16x!tt.ptr<i32>, #blocked>, tensor<16xi32, #blocked>
    %place_1 = tt.addptr %at_1, %slot_1 : tensor<16x!tt.ptr<i32>, #blocked1>, tensor<16xi32, #blocked1>
    %length = tt.load %place, %ok, %none : tensor<16x!tt.ptr<i32>, #blocked> loc(#loc1)
    %length_1 = tt.load %place_1, %ok_1, %none_1 : tensor<16x!tt.ptr<i32>, #blocked1> loc(#loc1)
    tt.store %place_1, %longer, %ok_1 : tensor<16x!tt.ptr<i32>, #blocked1> loc(#loc2)
"""


def test_what_some_threads_change_while_others_may_not_have_read_it_is_found() -> None:
    assert read_elsewhere(LENGTHS) == ("lengths",)
    for barrier in ("ttg.barrier all", "gpu.barrier"):
        assert read_elsewhere(LENGTHS.replace("    tt.store", f"    {barrier}\n    tt.store")) == ()
    assert read_elsewhere(LENGTHS.replace('"ttg.num-warps" = 4 :', '"ttg.num-warps" = 1 :')) == ()
    assert read_elsewhere(LENGTHS.replace("tt.load %place,", "tt.load %others,")) == (), "each reads what it writes"


@pytest.fixture
def only_if_asked(request: pytest.FixtureRequest) -> None:
    """Of what takes minutes, and says nothing more where there is a GPU: `make kernels` asks for it."""
    if not request.config.getoption("--large"):
        pytest.skip("many compilations: make kernels runs them")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "dependent"),
    [
        pytest.param(*target, id=name, marks=[] if target in ALWAYS else [pytest.mark.large])
        for name, target in zip(NAMES, TARGETS, strict=True)
    ],
)
def test_every_kernel_compiles_and_fits(
    capability: tuple[int, int], dependent: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """For 9.0, where it is launched programmatically, with each of its parts; for 8.9 if its code differs there, in the
    largest form that a launch asks for. `make kernels` has every set of parts for all of them, and all forms."""
    forms: Any = "parts" if request.config.getoption("--large") else "each" if dependent else "one"
    wanted, differing = launched_kernels(capability), differing_kernels()
    only = wanted & differing if forms == "one" else frozenset[str]()
    orders = Orders(
        shape=SHAPE, capability=capability, dependent=dependent, rows=ROWS, forms=forms, further=FURTHER, only=only,
    )  # fmt: skip
    found = compiled(orders, tmp_path)
    assert {kernel.kernel for kernel in found} == (only or wanted)
    check(found, capability, dependent)
    # What is not compiled for the GPU with the least shared memory takes as much on every GPU.
    same, least = launched_kernels((8, 9)) - differing, min(SHARED_MEMORY.values())
    assert [kernel for kernel in found if kernel.kernel in same and kernel.shared > least] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("changes", "capability", "dependent"),
    [
        pytest.param({}, (9, 0), True, id="plain, 9.0"),
        *(
            pytest.param(changes, capability, False, marks=pytest.mark.large)
            for changes, capability in (({}, (8, 9)), ({}, (10, 0)), (GEMMA2, (8, 9)), (GEMMA2, (9, 0)))
        ),
    ],
)
def test_attention_over_fp8_keys_and_values_compiles_and_fits(
    changes: dict[str, Any], capability: tuple[int, int], dependent: bool, tmp_path: Path, large: bool
) -> None:
    """In every run with each part, which are plans for few rows and for many; `make kernels` has all forms."""
    every: Any = "all" if large else "each"
    orders = Orders(
        shape=SHAPE, changes=changes, capability=capability, dependent=dependent, rows=ROWS, fp8_kv=True,
        forms="parts" if changes else every,
    )  # fmt: skip
    found = compiled(orders, tmp_path)
    kernels = {"_decode_kernel", "_rotate_and_write_kernel", "_chunk_kernel", "_lines_kernel"}
    assert {kernel.kernel for kernel in found} == kernels
    assert [kernel for kernel in found if kernel.unordered or kernel.shared > SHARED_MEMORY[capability]] == []
    widths = {kernel.widths for kernel in found if kernel.kernel == "_decode_kernel"}
    assert changes or (len(widths) == 1 and all(map(len, widths))), "one order of sums, for every number of rows"


@pytest.mark.usefixtures("only_if_asked")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("capability", "dependent"), TARGETS, ids=NAMES)
def test_the_default_tilings_of_every_shape_fit_for_every_number_of_rows(
    shape: str, capability: tuple[int, int], dependent: bool, tmp_path: Path
) -> None:
    rows = (1, 2, 8, 16, 32, 64, 256)
    orders = Orders(shape=shape, capability=capability, dependent=dependent, rows=rows)
    check(compiled(orders, tmp_path), capability, dependent)


@pytest.mark.usefixtures("only_if_asked")
@pytest.mark.timeout(900)
def test_a_newer_gpu_that_stands_for_an_older_one_has_its_kernels_in_the_older_form(tmp_path: Path) -> None:
    orders = Orders(shape=SHAPE, capability=(9, 0), dependent=False, rows=(1, 64))
    own = compiled(orders, tmp_path / "own")
    assert any("wgmma" in kernel.has for kernel in own)
    older = compiled(msgspec.structs.replace(orders, used_as="8.0"), tmp_path / "older")
    assert {kernel.kernel for kernel in older} == {kernel.kernel for kernel in own}
    check(older, (8, 0), False)


@pytest.mark.usefixtures("only_if_asked")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("head_dim", "heads", "dtype"),
    [*itertools.product((64, 96, 128, 256), (8, 32), ("bfloat16",)), (256, 8, "float16"), (128, 8, "float32")],
)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_every_size_of_head_fits_the_smallest_gpus(
    capability: tuple[int, int], head_dim: int, heads: int, dtype: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": 8}
    orders = Orders(shape="1B", changes=changes, dtype=dtype, capability=capability, dependent=False, rows=(1, 8, 64))
    check(compiled(orders, tmp_path), capability, False)
