"""On the way of a launch to a GPU nothing waits for the device, calls the host back, or logs: read from the sources.

A GPU shows such a wait only as lost time, so that it is looked for here, where there is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a launch runs through on a GPU, from the engine's loop to the kernels.
SOURCES = (
    "cuda_graphs/cuda_device.py",
    "cuda_graphs/enqueue_watch.py",
    "cuda_graphs/graph_pool.py",
    "cuda_graphs/marks.py",
    "runtime/programs/triton.py",
    "runtime/engine/loop.py",
    "runtime/models/decoder.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "runtime/kernels/triton").glob("*.py"))),
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
# Made from a list of the host's, these are copied from memory that is not pinned.
FROM_LISTS = {"torch.tensor", "torch.as_tensor", "torch.asarray"}
CALLBACKS = {"addcallback", "launchhostfunc", "add_callback", "launch_host_func", "hostfn"}
LOGGERS = {"logging", "structlog", "warnings"}

# Functions that may: nothing is in flight when they run, or a test asks for them.
MAY_WAIT = {
    "cuda_graphs/cuda_device.py": {"read_rows", "close", "_warm_up", "_forget"},
    "runtime/programs/triton.py": {"poison_blocks"},
    "runtime/engine/loop.py": {"_retire"},  # a mask of NumPy: the engine holds no tensor
    "runtime/kernels/triton/device_rows.py": {"read"},
    "runtime/kernels/triton/sampling.py": {"make_sampler_buffers"},
    "runtime/kernels/triton/vendor_choice.py": {"choose_kernel", "_exact"},
}
# Runs while the service warms up, and never in a capture.
WARMS_UP = "runtime/kernels/triton/vendor_choice.py"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, or nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_mask(index: ast.expr) -> bool:
    """`x[a > b]`, `x[~a]`: a tensor whose length the host must be told."""
    return isinstance(index, ast.Compare) or (isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Invert))


def waits_in(function: ast.FunctionDef) -> list[str]:
    """What a function does that waits for the device, by the words of its source."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = dotted(node.func)
            from_list = name in FROM_LISTS and any(keyword.arg == "device" for keyword in node.keywords)
            one_argument_where = name == "torch.where" and len(node.args) == 1
            if node.func.attr in WAITS or from_list or one_argument_where:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Subscript) and is_mask(node.slice):
            found.append(ast.unparse(node))
    return found


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
    ],
)
def test_this_check_sees_a_wait(line: str) -> None:
    (function,) = functions(ast.parse(f"def f():\n    {line}"))
    assert len(waits_in(function)) == 1
