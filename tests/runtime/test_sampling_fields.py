"""A sampling field keeps its name from the contract to the kernel that reads it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Final, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor

from runahead.runtime.row_record import ADMIT_WORDS, FLOAT32, INT32, RowParameters, Word, WordLayout
from runahead.runtime.scheduler.new_row import SAMPLING_NUMBERS
from runahead.runtime.wire.parameters import SamplingParams
from runahead.v1 import generate_pb2
from tests.project.repository import parsed, sources

FIELDS: Final = [*SAMPLING_NUMBERS, "seed"]
KERNELS: Final = tuple(sources("runtime/kernels/triton"))
REFERENCE: Final = tuple(sources("runtime/kernels/reference", "runtime/programs/cpu"))
JIT: Final = re.compile(r"(triton|gluon)\.jit")


@cache
def contract() -> frozenset[str]:
    """Fields of messages of generate.proto."""
    found: set[str] = set()
    waiting: list[Descriptor] = list(generate_pb2.DESCRIPTOR.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        found.update(message.fields_by_name)
        waiting += message.nested_types
    return frozenset(found)


@cache
def places() -> dict[str, set[str]]:
    """Kernels' constants that are offsets of a field in a row's record, by field: `_TOP_K = offset_of("top_k")`."""
    found: dict[str, set[str]] = {}
    for path in KERNELS:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if ast.unparse(node.value.func) == "offset_of":
                    [field] = node.value.args
                    assert isinstance(field, ast.Constant)
                    found.setdefault(str(field.value), set()).update(ast.unparse(target) for target in node.targets)
    return found


def functions() -> Iterator[ast.FunctionDef]:
    """All functions of the Triton kernels' files, on the host or not."""
    for path in KERNELS:
        yield from (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef))


def loaded(function: ast.FunctionDef) -> set[str]:
    """Names that a function's body reads or calls."""
    names = (node for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}


@cache
def loaded_by_kernels() -> frozenset[str]:
    """Names that the launched kernels read or call, and the functions that they call. Host functions launch them."""
    found: set[str] = set()
    kernels: dict[str, set[str]] = {}
    waiting: set[str] = set()
    for function in functions():
        if any(JIT.match(ast.unparse(decorator)) for decorator in function.decorator_list):
            kernels.setdefault(function.name, set()).update(loaded(function))
        else:
            waiting |= loaded(function)
    waiting &= kernels.keys()
    while waiting:
        new = kernels.get(waiting.pop(), set()) - found
        found |= new
        waiting |= new & kernels.keys()
    return frozenset(found)


@cache
def read_by_the_reference() -> frozenset[str]:
    """Attributes that the CPU's kernels read. A constructor `of` only copies the row state."""
    return frozenset(
        node.attr
        for path in REFERENCE
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef) and function.name != "of"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


def read_by_a_function() -> list[str]:
    """Fields with a function, such as `temperature_of(slot, parameters)`."""
    names = {function.name for function in functions()}
    return [field for field in FIELDS if f"{field}_of" in names]


def named(target: ast.expr, value: ast.expr) -> list[tuple[str, str]]:
    """(variable, field) of an assignment from `FIELD_of(...)`, or from several of them."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [pair for one, of in zip(target.elts, value.elts, strict=True) for pair in named(one, of)]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        field = value.func.id.removesuffix("_of")
        if field in FIELDS and field != value.func.id:
            return [(ast.unparse(target), field)]
    return []


def test_the_fields_are_those_of_a_request() -> None:
    assert len(FIELDS) >= 10
    assert set(FIELDS) <= {*SamplingParams.__struct_fields__}


@pytest.mark.parametrize("added", [INT32, FLOAT32], ids=["int32", "float32"])
@pytest.mark.parametrize("before", [*SAMPLING_NUMBERS, "min_position"])
def test_a_parameter_of_32_bits_can_be_added_before_any_other(added: Word, before: str) -> None:
    declared = dict[str, object](get_type_hints(RowParameters, include_extras=True))
    names = list(declared)
    names.insert(names.index(before), "added")
    annotations = {"added": Annotated[object, added], **declared}
    extended = type("Extended", (), {"__annotations__": {name: annotations[name] for name in names}})
    layout = WordLayout(extended, ADMIT_WORDS)
    assert layout.names == tuple(names)
    assert layout.offset(before) == layout.offset("added") + 1


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_has_one_name_from_the_contract_to_the_kernel(field: str) -> None:
    assert field in contract()
    assert places()[field] == {f"_{field.upper()}"}


@pytest.mark.parametrize("field", FIELDS)
def test_kernels_and_the_reference_read_each_field(field: str) -> None:
    assert f"_{field.upper()}" in loaded_by_kernels()
    assert field in read_by_the_reference()


def test_some_fields_have_a_function_that_reads_them() -> None:
    assert {"temperature", "top_k", "top_p", "min_p", "seed"} <= set(read_by_a_function())


@pytest.mark.parametrize("field", read_by_a_function())
def test_what_a_kernel_reads_of_a_field_is_called_like_it(field: str) -> None:
    variables = {
        variable
        for path in KERNELS
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assign)
        for target in node.targets
        for variable, of in named(target, node.value)
        if of == field
    }
    assert variables <= {field}
