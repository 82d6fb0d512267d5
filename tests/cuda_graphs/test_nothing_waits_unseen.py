"""On the way of a launch to a GPU nothing waits for the device, calls the host back, or logs: read from the sources.

A GPU shows such a wait only as lost time, so that it is looked for here, where there is none.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a launch runs through on a GPU, from the engine's loop to the kernels.
SOURCES = (
    "cuda_graphs/cuda_device.py",
    "cuda_graphs/enqueue_watch.py",
    "cuda_graphs/graph_pool.py",
    "cuda_graphs/marks.py",
    "runtime/programs/cuda/program.py",
    "runtime/engine/loop.py",
    "runtime/models/decoder.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "runtime/kernels/triton").rglob("*.py"))),
)
# Attributes that read a tensor back, or wait. `numpy` and `tolist` wait only for a tensor, which no name tells.
WAITS = {
    "argwhere",
    "bincount",
    "cpu",
    "equal",
    "item",
    "masked_select",
    "multinomial",
    "nonzero",
    "synchronize",
    "unique",
}
REDUCTIONS = {"all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "max", "mean", "min", "prod", "sum"}
NUMBERS = {"bool", "complex", "float", "int"}  # a tensor that becomes one of these is read back
# Made from a list of the host's, these are copied from memory that is not pinned.
FROM_LISTS = {"torch.tensor", "torch.as_tensor", "torch.asarray"}
CALLBACKS = {"addcallback", "launchhostfunc", "add_callback", "launch_host_func", "hostfn"}
LOGGERS = {"logging", "structlog", "warnings"}

# Functions that may: nothing is in flight when they run, or a test asks for them.
MAY_WAIT = {
    "cuda_graphs/cuda_device.py": {"read_rows", "close", "_warm_up", "_forget"},
    "cuda_graphs/graph_pool.py": {"fastest_ms"},
    "runtime/engine/loop.py": {"_retire"},  # a mask of NumPy: the engine holds no tensor
    "runtime/kernels/triton/row_updates/rows.py": {"read"},
    "runtime/kernels/triton/sampling/sampler.py": {"make_sampler_buffers"},
    "runtime/kernels/triton/gemm/cublaslt_choice.py": {"choose_kernel", "_exact"},
}
# Runs while the service warms up, and never in a capture.
WARMS_UP = "runtime/kernels/triton/gemm/cublaslt_choice.py"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, or nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_mask(index: ast.expr, masks: Collection[str] = ()) -> bool:
    """`x[a > b]`, `x[~a]`, `x[a & b]`: a tensor whose length the host must be told. masks: names of such tensors."""
    if isinstance(index, ast.BinOp) and isinstance(index.op, ast.BitAnd | ast.BitOr):
        return is_mask(index.left, masks) or is_mask(index.right, masks)
    is_inverse = isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Invert)
    return is_inverse or isinstance(index, ast.Compare) or (isinstance(index, ast.Name) and index.id in masks)


def masks_of(function: ast.FunctionDef) -> set[str]:
    """Names that a function gives to masks."""
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return {target.id for node in assigned if is_mask(node.value) for target in node.targets if is_name(target)}


def is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def is_reduction(node: ast.AST) -> bool:
    """An expression with `x.sum()` or `(x > 0).any()`; `tl.sum(x)` is the kernel's own."""
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr in REDUCTIONS
        and dotted(inner.func.value) != "tl"
        for inner in ast.walk(node)
    )


def is_wait(call: ast.Call) -> bool:
    """A call that reads a tensor back, copies a list to the device, or asks how many elements a mask has."""
    name = dotted(call.func)
    if name in NUMBERS:
        return any(is_reduction(argument) for argument in call.args)
    if not isinstance(call.func, ast.Attribute):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    to_the_host = call.func.attr == "to" and any("cpu" in ast.unparse(argument) for argument in given)
    from_list = name in FROM_LISTS and any(keyword.arg == "device" for keyword in call.keywords)
    one_argument_where = name == "torch.where" and len(call.args) == 1
    return call.func.attr in WAITS or to_the_host or from_list or one_argument_where


def waits_in(function: ast.FunctionDef) -> list[str]:
    """What a function does that waits for the device, by the words of its source."""
    masks, found = masks_of(function), list[ast.expr]()
    for node in ast.walk(function):
        match node:
            case ast.Call() if is_wait(node):
                found.append(node)
            case ast.Subscript(slice=index) if is_mask(index, masks):
                found.append(node)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if is_reduction(test):
                found.append(test)
    return [ast.unparse(node) for node in found]


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_on_the_way_of_a_launch_waits_for_the_device(source: str) -> None:
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    waits = {function.name: found for function in functions(tree) if (found := waits_in(function))}
    assert set(waits) == MAY_WAIT.get(source, set()), waits


@pytest.mark.parametrize("source", SOURCES)
def test_the_device_never_calls_the_host_back(source: str) -> None:
    """A callback of CUDA's that takes the interpreter's lock waits for a thread that may wait for the device."""
    words = {
        word
        for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
        for word in [node.attr if isinstance(node, ast.Attribute) else node.id]
    }
    assert not {word for word in words if any(part in word.lower() for part in CALLBACKS)}


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_on_the_way_of_a_launch_logs(source: str) -> None:
    """What happens in every launch is counted: a line for each would fill a disk."""
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    prints = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and dotted(node.func) == "print"]
    assert not imported & LOGGERS
    assert not prints


@pytest.mark.parametrize("source", [source for source in SOURCES if source != WARMS_UP])
def test_no_state_of_a_random_generator_can_be_captured(source: str) -> None:
    """A graph would repeat the numbers that it was captured with. Noise is a function of seed and position."""
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    random = {"rand", "randn", "randint", "bernoulli_", "exponential_", "uniform_", "Generator", "manual_seed"}
    assert not {name for name in names if name.split(".")[-1] in random}


@pytest.mark.parametrize(
    "line",
    [
        "n = x.item()",
        "y = torch.multinomial(p, 1)",
        "torch.cuda.synchronize()",
        "t = torch.tensor([1, 2], device='cuda')",
        "y = x[x > 0]",
        "y = x[~alive]",
        "i = torch.where(alive)",
        "n = int(x.sum())",
        "n = int(2 * (x > 0).sum() + 1)",
        "if bool(x.any()): pass",
        "if x.any(): pass",
        "n = 1 if torch.all(x) else 2",
        "h = x.to('cpu')",
        "h = x.to(device='cpu', non_blocking=True)",
        "h = x.to(torch.device('cpu'))",
        "mask = x > 0; y = x[mask]",
        "mask = ~alive; y = x[mask]",
        "y = x[alive & (x > 0)]",
    ],
)
def test_this_check_sees_a_wait(line: str) -> None:
    (function,) = functions(ast.parse(f"def f():\n    {line}"))
    assert waits_in(function)


@pytest.mark.parametrize(
    "line",
    [
        "n = int(count)",
        "y = x[rows]",
        "y = x[: batch.rows]",
        "if batch.is_decode: pass",
        "x.to('cuda')",
        "if tl.max(x) > 0: pass",
        "y = torch.where(x > 0, x, 0)",
        "y = (x > 0).sum()",
    ],
)
def test_this_check_lets_pass_what_does_not_wait(line: str) -> None:
    (function,) = functions(ast.parse(f"def f():\n    {line}"))
    assert not waits_in(function)
