"""The CUDA device's marks and stamps: which launch's number, and which slot. On the CPU, where there is neither the
device's clock nor a fence of the system, both are stood in for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from runahead.cuda_graphs import marks  # noqa: E402

SLOTS = 4


@triton.jit
def _plain_store(pointer, value):  # type: ignore[no-untyped-def]
    tl.store(pointer, value)


@triton.jit
def _clock():  # type: ignore[no-untyped-def]
    return tl.full((), 1 << 60, tl.int64)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(marks, "_release", _plain_store)
        monkeypatch.setattr(tl.extra.cuda, "globaltimer", _clock)
    yield


def mapped(count: int) -> torch.Tensor:
    tensor = torch.zeros(count, dtype=torch.int64)
    return tensor.pin_memory() if DEVICE.type == "cuda" else tensor


@pytest.mark.parametrize("launched", [0, (1 << 31) - 3, (1 << 32) - 3])
def test_each_launch_leaves_its_own_number_and_stamps_its_own_slot(launched: int) -> None:
    counter = torch.full((1,), launched, dtype=torch.int64, device=DEVICE)
    seen, start_ns, end_ns = mapped(marks.MARKS), mapped(SLOTS), mapped(SLOTS)
    for number in range(launched + 1, launched + 7):
        start_ns.zero_()
        end_ns.zero_()
        marks.start(counter, start_ns)
        before, is_short = number - 1 if number > launched + 1 else 0, number % 2 == 0
        marks.sampled(counter, seen, in_tail=is_short)
        finish()
        assert seen.tolist() == [number, number if is_short else before, before], "F has not ended"
        assert not end_ns.any()
        if not is_short:
            marks.tail(counter, seen)
        finish()
        assert seen.tolist() == [number, number, before]
        marks.ended(counter, seen, end_ns)
        finish()
        assert seen[marks.SAMPLED] == seen[marks.ENDED] == number
        for stamps in (start_ns, end_ns):
            assert stamps.nonzero().flatten().tolist() == [number % SLOTS]
        assert int(end_ns[number % SLOTS]) >= int(start_ns[number % SLOTS]) > 0


def finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
