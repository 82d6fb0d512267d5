"""A kernel's predecessor in Triton's interpreter: what it makes is not there until the kernel waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

NAN = float("nan")


class Predecessor:
    """Makes `made` while the kernel starts: NaN, or -1, from its first instruction until it waits. `written`: by the
    kernel; what is in both is added to.

    Programs run one after the other, so that what earlier ones wrote counts as there when the next one begins.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        module: Any,
        made: list[torch.Tensor],
        written: list[torch.Tensor],
        waiting: Sequence[Any] = (),
    ) -> None:
        self._made, self._written = made, [tensor for tensor in written if not any(tensor is one for one in made)]
        self._real: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self.waits = 0  # programs that have waited
        self._waited = False
        patch.setattr(module, "let_dependents_start", self._start)
        for one in {module, *waiting}:
            patch.setattr(one, "wait_for_predecessors", self._wait)

    def _start(self, dependent: Any) -> None:
        self._real = [tensor.clone() for tensor in self._made]
        self._before = [tensor.clone() for tensor in self._written]
        for tensor in self._made:
            tensor.fill_(_poison(tensor))
        self._waited = False

    def _wait(self, dependent: Any) -> None:
        if self._waited:  # by this program: there is nobody left to wait for
            return
        self._waited = True
        for tensor in self._made:
            poisoned = tensor.isnan() if tensor.is_floating_point() else tensor == _poison(tensor)
            assert poisoned.all(), "a kernel wrote before it waited"
        for tensor, real in zip(self._made, self._real, strict=True):
            tensor.copy_(real)
        for before, tensor in zip(self._before, self._written, strict=True):
            assert torch.equal(before.nan_to_num(7.0), tensor.nan_to_num(7.0)), "a kernel wrote before it waited"
        self.waits += 1


def _poison(tensor: torch.Tensor) -> float:
    return NAN if tensor.is_floating_point() else -1


def check(
    patch: pytest.MonkeyPatch, module: Any, made: list[torch.Tensor], written: list[torch.Tensor],
    run: Callable[[], None], programs: int, waiting: Sequence[Any] = (),
) -> None:  # fmt: skip
    """Run once with nothing in the way, and once behind a predecessor: the same is written. waiting: modules of which
    parts of the kernel wait."""
    blank = [tensor.clone() for tensor in written]
    run()
    expected = [tensor.clone() for tensor in written]
    for tensor, before in zip(written, blank, strict=True):
        tensor.copy_(before)
    predecessor = Predecessor(patch, module, made, written, waiting)
    run()
    assert predecessor.waits == programs, "every program waits that has work"
    for found, wanted in zip(written, expected, strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), "it read what was not there yet"
