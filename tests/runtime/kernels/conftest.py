"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory of torch's holds numbers that a kernel must not read."""
    from tests.runtime.kernels.poisoned_memory import poison_new_memory  # imports triton

    poison_new_memory(monkeypatch)


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products sum in the order of a GPU's matrix units, in Triton's interpreter too. torch is in inference mode."""
    from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # imports triton
    from tests.runtime.kernels.triton_device import triton_device

    if triton_device().type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    with torch.inference_mode():
        yield


@pytest.fixture
def fp8_matrix_units(matrix_units: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and the interpreter rounds to bfloat16 as a GPU does."""
    from tests.runtime.kernels.matrix_units import round_to_bfloat16  # imports triton
    from tests.runtime.kernels.triton_device import triton_device

    if triton_device().type == "cpu":
        round_to_bfloat16(monkeypatch)
