"""Experts of a layer that a checkpoint has in one tensor, as Qwen3.5 is published: they are those that lie alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Experts
from runahead.runtime.models.drafters.mtp import open_mtp
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import check_weights
from tests.runtime.models.qwen_heads import HEADED, LAYER, save_with_qwen_head
from tests.runtime.models.test_eagle import as_it_is
from tests.runtime.models.test_text_parts import logits, wrap

EXPERTS = "model.layers.0.mlp.experts"


def stack(folder: Path, begins: tuple[str, ...] = ("model.", "mtp.")) -> None:
    """The experts of these layers in one tensor each, gate before up, without `.weight` in its name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    blocks = {found[1] for name in tensors if (found := re.fullmatch(r"(.*mlp\.experts)\.0\.down_proj\.weight", name))}
    for block in sorted(block for block in blocks if block.startswith(begins)):
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.{number}.{part}_proj.weight") for number in range(7)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{block}.gate_up_proj": torch.cat([gate, up], dim=1), f"{block}.down_proj": down}
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_they_compute_what_experts_that_lie_alone_compute(name: str, tmp_path: Path) -> None:
    save_with_qwen_head(tmp_path, HEADED[name])
    alone, bytes_alone = logits(tmp_path), size_of(tmp_path)
    stack(tmp_path)
    assert torch.equal(logits(tmp_path), alone)
    assert size_of(tmp_path) == bytes_alone


def test_experts_that_are_there_in_both_forms_are_refused(tmp_path: Path) -> None:
    save_with_qwen_head(tmp_path, HEADED["qwen3_next"])
    path = tmp_path / "model.safetensors"
    alone = load_file(path)
    stack(tmp_path)
    save_file({**alone, **load_file(path)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.0\.\w+_proj\.weight is there twice: by itself, and in model"):
        logits(tmp_path)


def size_of(folder: Path) -> int:
    checkpoint = open_checkpoint(folder)
    return sum(tensor.size_bytes for tensor in check_weights(checkpoint, load_config(checkpoint)).values())


@pytest.mark.parametrize("stacked", [("model.",), ("mtp.",), ("model.", "mtp.")])
def test_those_of_a_head_too_beside_pictures_and_whichever_way_the_model_has_them(
    stacked: tuple[str, ...], tmp_path: Path
) -> None:
    tensors = save_with_qwen_head(tmp_path, HEADED["qwen3_5_moe"])
    stack(tmp_path, stacked)
    wrap(tmp_path, "qwen3_5_moe")
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "mtp.fc.weight": tensors["mtp.fc.weight"]}, path, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    config = load_config(checkpoint)
    check_weights(checkpoint, config)
    head = open_mtp(checkpoint, config, "--drafter mtp", has_weights=True).weights(as_it_is)
    experts = head.feed_forward
    assert isinstance(experts, Experts)
    for number in (0, 6):
        parts = [tensors[f"{LAYER}mlp.experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down")]
        assert torch.equal(experts.gate_up[number].weight, torch.cat(parts[:2]))
        assert torch.equal(experts.down[number].weight, parts[2])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{EXPERTS}.gate_up_proj": torch.zeros(7, 40, 64)}, r"experts.gate_up_proj has shape \[7, 40, 64\]; .* 80"),
        ({f"{EXPERTS}.down_proj": torch.zeros(6, 64, 40)}, r"experts.down_proj has shape \[6, 64, 40\]; .*\[7, 64, 40"),
        ({f"{EXPERTS}.down_proj": torch.zeros(64, 40)}, r"experts.down_proj has shape \[64, 40\]"),
        ({f"{EXPERTS}.down_proj": None}, r"has no tensor model.layers.0.mlp.experts.0.down_proj.weight"),
    ],
)
def test_stacks_of_another_shape_and_those_that_are_missing_are_named(
    changes: dict[str, torch.Tensor | None], sentence: str, tmp_path: Path
) -> None:
    save_with_qwen_head(tmp_path)
    stack(tmp_path)
    path = tmp_path / "model.safetensors"
    found = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=sentence):
        check_weights(checkpoint, load_config(checkpoint))
