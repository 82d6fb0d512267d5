"""Kernels learn in one place what an activation is, and refuse an unknown one there."""

from __future__ import annotations

import ast
from typing import Final, cast, get_args

import pytest

from runahead.runtime.kernels.activations import has_gate, is_gelu_tanh
from runahead.runtime.kernels.layers import Activation, ExpertActivation
from tests.project.repository import name_of, parsed, sources

NAMES: Final = {*get_args(Activation), *get_args(ExpertActivation)}


def compared(comparison: ast.Compare | ast.MatchValue) -> set[object]:
    """Constants in a comparison or in a case of a `match`."""
    return {node.value for node in ast.walk(comparison) if isinstance(node, ast.Constant)}


def test_no_other_file_compares_the_name_of_an_activation() -> None:
    files = {
        name_of(path)
        for path in sources("runtime/kernels", "runtime/programs")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare | ast.MatchValue) and compared(node) & NAMES
    }
    assert files == {"runtime/kernels/activations.py"}


def test_every_activation_is_known() -> None:
    assert {name: is_gelu_tanh(name) for name in get_args(Activation)} == {"silu": False, "gelu_tanh": True}
    assert {name: has_gate(name) for name in get_args(ExpertActivation)} == {"silu": True, "squared_relu": False}


def test_an_unknown_activation_is_computed_as_no_other() -> None:
    with pytest.raises(AssertionError, match="relu"):
        is_gelu_tanh(cast(Activation, "relu"))
    with pytest.raises(AssertionError, match="relu"):
        has_gate(cast(ExpertActivation, "relu"))
