"""Draft heads on a GPU, captured graphs and all: no token changes at any depth, and as many drafts are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.kernels.headed_engine import (
    KINDS,
    OVER_STATES,
    Served,
    cpu_engine,
    served,
    triton_engine,
    write_pair,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEPTHS = (0, 1, 2, 4)


def on_gpu(folder: Path, run_ahead: int, dtype: torch.dtype = torch.bfloat16, *, drafts: bool) -> Served:
    engine = triton_engine(folder, torch.device("cuda"), run_ahead, drafts=drafts, dtype=dtype, captured=True)
    return served(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_changes_no_token_and_is_right_as_often_at_every_depth(kind: str, tmp_path: Path) -> None:
    write_pair(tmp_path, kind)
    plain = on_gpu(tmp_path, 2, drafts=False)
    found = {depth: on_gpu(tmp_path, depth, drafts=True) for depth in DEPTHS}
    for depth, one in found.items():
        print(f"{kind}, depth {depth}: drafted {one.drafted}, accepted {one.accepted}")
        assert (one.tokens, one.reasons) == (plain.tokens, plain.reasons), f"depth {depth}"
        assert one == found[0], f"depth {depth}"
    assert found[0].drafted[0] > found[0].accepted[0] > found[0].accepted[1] > 0
    assert (found[0].cached_tokens, found[0].snapshots_found) == (32, int(kind == OVER_STATES))


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_as_many_drafts_are_right_as_on_the_cpu(kind: str, tmp_path: Path) -> None:
    write_pair(tmp_path, kind)
    assert on_gpu(tmp_path, 2, torch.float32, drafts=True) == served(cpu_engine(tmp_path, 2, drafts=True))
