"""Ranks give the bits of one process that computes their segments in rank order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import OneDnnProducts
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import why_not_divided
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.ranks.host_ranks import on_each, ranks_of
from tests.runtime.ranks.segments import segmented

CPU = torch.device("cpu")
NAMES = (
    "llama", "llama_tied_biased", "llama_bfloat16_sharded", "qwen2_windows", "qwen3_biased_grouped", "granite_biased",
    "phi3", "gemma2", "gemma3", "smollm3", "mimo", "mixtral_window", "qwen3_moe_dense_between",
    "glm4_moe_bfloat16_two_shared", "bamba_groups", "granite_hybrid", "qwen3_next", "qwen3_5_moe", "nemotron_h",
)  # fmt: skip


def load(folder: Path, ranks: Ranks, kv_dtype: str = "auto") -> Decoder:
    checkpoint, kernels = open_checkpoint(folder), ReferenceKernels(OneDnnProducts())
    return load_model(checkpoint, CPU, torch.float32, "auto", kernels, positions=64, ranks=ranks, kv_dtype=kv_dtype)


@torch.inference_mode()
def logits_of(decoder: Decoder) -> torch.Tensor:
    """Of two sequences, in chunks and token by token."""
    trial = Trial(decoder, [[3, 17, 5, 80, 41, 2, 9], [7, 7, 60]], 16, 8, seed=1)
    works: list[list[tuple[int, int]]] = [[(0, 4), (1, 1)], [(1, 1), (0, 1)], [(0, 2), (1, 1)]]
    return torch.cat([logits for work in works for logits in trial.advance(work)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of", [2, 4])
def test_ranks_give_the_bits_of_segments_in_one_process(name: str, of: int, tmp_path: Path) -> None:
    """And what the whole model gives, within rounding."""
    case = next(case for case in CASES if case.name == name)
    save(case, tmp_path)
    if why := why_not_divided(load_config(open_checkpoint(tmp_path)), of):
        pytest.skip(why)
    expected = logits_of(segmented(lambda ranks: load(tmp_path, ranks), of))
    found = on_each(ranks_of(of, 256), lambda ranks: logits_of(load(tmp_path, ranks)))
    assert torch.equal(found[0], expected)
    assert all(part.shape == (len(expected), 0) for part in found[1:])
    whole = logits_of(load(tmp_path, ONE_RANK))
    torch.testing.assert_close(expected, whole, rtol=2e-4, atol=2e-4)


def test_ranks_with_fp8_keys_and_values_give_the_bits_of_segments_in_one_process(tmp_path: Path) -> None:
    save(CASES[0], tmp_path)
    expected = logits_of(segmented(lambda ranks: load(tmp_path, ranks, "fp8"), 2))
    found = on_each(ranks_of(2, 256), lambda ranks: logits_of(load(tmp_path, ranks, "fp8")))
    assert torch.equal(found[0], expected)
    assert not torch.equal(expected, logits_of(segmented(lambda ranks: load(tmp_path, ranks), 2)))
