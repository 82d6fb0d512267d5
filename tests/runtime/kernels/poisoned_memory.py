"""New tensors of a test hold nonsense, so that the numbers show who reads what nobody has written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_NONSENSE = {torch.int8: 77, torch.int32: 77_777_777, torch.int64: 77_777_777}


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty and its kin give is NaN, or of integers a number that is no place of anything."""

    def spoilt(tensor: torch.Tensor) -> torch.Tensor:
        nonsense = float("nan") if tensor.is_floating_point() else _NONSENSE.get(tensor.dtype, 1)
        return tensor.fill_(nonsense)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def made(*arguments: Any, original: Any = original, **options: Any) -> torch.Tensor:
            return spoilt(original(*arguments, **options))

        monkeypatch.setattr(owner, name, made)
