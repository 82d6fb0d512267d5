"""A model that two GPUs have between them: exchanges to the bit, the tokens of the engine, and what becomes of it when
a rank is killed under load."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from tests.gpu.engine_on_gpus import DEPTHS, LENGTHS, TOKENS, Outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="ranks need two GPUs, and this machine has fewer than that"
    ),
]


def run(module: str) -> str:
    """What it prints. The process ends by itself."""
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_exchanges_give_the_sums_in_rank_order_to_the_bit() -> None:
    """Eagerly and in graphs, with inputs that change from step to step."""
    assert "rank 0: 0 exchanges differ" in run("tests.gpu.exchanges_on_gpus")


def test_tokens_are_the_same_at_every_depth_alone_and_among_others_until_a_rank_is_killed_under_load() -> None:
    """The engine then fails with a sentence, within the time that a launch may take, and both GPUs are free."""
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    found = msgspec.json.decode(run("tests.gpu.engine_on_gpus").strip().splitlines()[-1], type=Outcome)
    assert [len(tokens) for tokens in found.alone] == [TOKENS] * len(LENGTHS)
    assert sorted(found.together) == sorted(DEPTHS)
    for depth, (forth, back) in found.together.items():
        assert forth == found.alone, depth
        assert back == found.alone, depth
    assert "rank 1 has ended (signal SIGKILL)" in found.failed
    assert found.failed_s < 10.0
    for gpu in range(2):
        assert torch.cuda.mem_get_info(gpu)[0] >= free[gpu] - (1 << 30), f"GPU {gpu} is not free"
