"""Which GPUs can be ranks of one model: what torch says of them is played."""

from __future__ import annotations

import pytest
import torch

from runahead.runtime.ranks.peer_memory import why_not_together


def play(monkeypatch: pytest.MonkeyPatch, names: list[str], reaches: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reaches)


def test_equal_gpus_that_reach_each_other_can(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, ["H200", "H200", "A100"])
    assert why_not_together(range(2)) == ""


def test_ranks_that_share_a_gpu_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, ["H200"], reaches=False)
    assert why_not_together((0, 0)) == ""


@pytest.mark.parametrize(
    ("names", "reaches", "sentence"),
    [
        (["H200"], True, "it needs 2 GPUs, one a rank, and this process sees 1"),
        (["H200", "A100"], True, "all ranks need the same kind of GPU, and these are H200, A100"),
        (["H200", "H200"], False, "GPU 0 can't reach the memory of GPU 1"),
    ],
)
def test_others_are_refused_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch, names: list[str], reaches: bool, sentence: str
) -> None:
    play(monkeypatch, names, reaches)
    assert why_not_together(range(2)).startswith(sentence)
