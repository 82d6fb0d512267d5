"""LongRoPE's two sets of factors: which one serves is a matter of the context length, and of no sequence's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Phi3Config

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.load import load_model
from tests.runtime.models.checkpoints import IDS, PHI3_LONGROPE, Case, save

ORIGINAL = 24
CASE = Case("phi3_longrope", Phi3Config, {**IDS, **PHI3_LONGROPE, "original_max_position_embeddings": ORIGINAL})


@pytest.mark.parametrize(
    ("context", "prompts"),
    [(ORIGINAL, (ORIGINAL, 7)), (ORIGINAL + 1, (ORIGINAL + 1,)), (0, (ORIGINAL + 1, 90, 60))],
    ids=["short", "long by one", "long"],
)
def test_logits_are_those_of_transformers(context: int, prompts: tuple[int, ...], tmp_path: Path) -> None:
    oracle = save(CASE, tmp_path)
    with torch.inference_mode():
        cpu, kernels = torch.device("cpu"), ReferenceKernels()
        ours = load_model(open_checkpoint(tmp_path), cpu, torch.float32, "auto", kernels, positions=context)
        tokens = [[(31 * i + 7 * j) % 160 for j in range(length)] for i, length in enumerate(prompts)]
        found = Trial(ours, tokens, max(prompts), 16, seed=3).advance(list(enumerate(prompts)))
        for prompt, logits in zip(tokens, found, strict=True):
            assert (logits - oracle(torch.tensor([prompt])).logits[0]).abs().max().item() <= 2e-4
