"""Heads of Qwen3-Next and Qwen3.5: read from the model's own files, and refused, each by its own sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Dense, Experts, Layer
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.drafters.mtp import comes_with_head, names_head, open_mtp
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.read_config import load_config, parse_config
from runahead.runtime.models.weights import check_weights
from tests.runtime.models.checkpoints import save
from tests.runtime.models.public_configs import PUBLIC
from tests.runtime.models.qwen_heads import BEGIN, HEADED, LAYER, save_with_qwen_head
from tests.runtime.models.test_eagle import as_it_is
from tests.runtime.models.test_text_parts import wrap

SPARSE, DENSE = "qwen3_5_moe", "qwen3_5"


def opened(folder: Path, **changes: Any) -> HeadFiles:
    """changes: of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    return open_mtp(checkpoint, load_config(checkpoint), "--drafter mtp", has_weights=True)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """None: the tensor is taken away."""
    path = folder / "model.safetensors"
    found = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path, {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_with_qwen_head(tmp_path, HEADED[DENSE])
    return tmp_path


@pytest.mark.parametrize("name", [DENSE, SPARSE])
def test_its_tensors_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    tensors = save_with_qwen_head(tmp_path, HEADED[name])
    head = opened(tmp_path)
    weights = head.weights(as_it_is)
    assert weights.parameters == sum(tensor.numel() for tensor in tensors.values())
    product, width = weights.fuse.product, weights.width
    assert product is not None and torch.equal(product.weight, tensors[f"{BEGIN}fc.weight"])
    assert weights.norm is not None and torch.equal(weights.norm.weight, 1.0 + tensors[f"{BEGIN}norm.weight"])
    assert isinstance(weights.feed_forward, Dense if name == DENSE else Experts)
    assert (weights.embedding, weights.lm_head) == (None, None)
    cache = memory_of((Layer(weights.mixer, weights.feed_forward),)).make_cache(
        3, 16, torch.float32, torch.device("cpu")
    )
    kept = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) + 3 * 16 * width * 4
    assert 3 * head.block_bytes(16) == kept


def test_a_step_reads_the_experts_that_a_token_chooses(tmp_path: Path) -> None:
    save_with_qwen_head(tmp_path, HEADED[SPARSE])
    kernels = ReferenceKernels()
    target = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32, "auto", kernels)
    head = opened(tmp_path).load(target, kernels, 128, drawn=False)
    of_head, idle = target.config.vocab_size * target.config.hidden_size, (7 - 3) * 3 * 64 * 40
    read = target.num_parameters - of_head - len(target.weights.layers) * idle
    assert head.step_fraction == (head.parameters - idle + of_head) / read


@pytest.mark.parametrize("name", [DENSE, SPARSE])
def test_the_head_of_a_checkpoint_with_pictures_is_found_beside_its_text(name: str, tmp_path: Path) -> None:
    tensors = save_with_qwen_head(tmp_path, HEADED[name])
    wrap(tmp_path, name)
    rewrite(tmp_path, {f"{BEGIN}fc.weight": tensors[f"{BEGIN}fc.weight"]})
    assert opened(tmp_path).weights(as_it_is).parameters == sum(tensor.numel() for tensor in tensors.values())


def test_the_model_without_a_drafter_passes_over_its_head(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert f"{BEGIN}fc.weight" in check_weights(checkpoint, load_config(checkpoint))
    rewrite(folder, {f"{BEGIN}fc.weight": torch.zeros(2), f"{BEGIN}what_comes_tomorrow": torch.zeros(2)})
    check_weights(open_checkpoint(folder), load_config(checkpoint))


def test_it_is_drawn_where_the_model_is_drawn_and_no_file_is_looked_at(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder)
    config = load_config(checkpoint)
    assert comes_with_head(checkpoint, config, has_weights=False)
    head = open_mtp(checkpoint, config, "--drafter mtp", has_weights=False)
    one, again = head.weights(as_it_is, drawn=True), head.weights(as_it_is, drawn=True)
    assert torch.equal(one.mixer.o.weight, again.mixer.o.weight)


def test_published_configurations_say_that_a_head_comes_with_them() -> None:
    for name in ("Qwen3-Next 80B-A3B", "Qwen3.5 27B", "Qwen3.5 35B-A3B"):
        assert names_head(parse_config(PUBLIC[name], ()))


def test_a_checkpoint_whose_head_was_left_out_is_refused_by_the_tensor_that_is_missing(tmp_path: Path) -> None:
    save(HEADED["qwen3_next"], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert not comes_with_head(checkpoint, load_config(checkpoint), has_weights=True)
    with pytest.raises(CheckpointError, match=r"--drafter mtp drafts .* lacks it: there is no tensor mtp.fc.weight"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mtp_num_hidden_layers": 0}, r"--drafter mtp .* by its config.json .* has no head"),
        ({"mtp_num_hidden_layers": 2}, r"--drafter mtp .* has 2 heads, which guess one after the other"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers is -1; it must be an integer of at least 0"),
        (
            {"mtp_use_dedicated_embeddings": True},
            "mtp_use_dedicated_embeddings is True: the head has a separate embedding",
        ),
    ],
)
def test_a_checkpoint_without_one_head_that_shares_its_embedding_is_refused(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder, **changes)


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        (f"{BEGIN}norm.weight", None, "the head in .* has no tensor mtp.norm.weight"),
        (f"{LAYER}self_attn.q_norm.weight", None, "has no tensor mtp.layers.0.self_attn.q_norm.weight"),
        (f"{BEGIN}fc.weight", torch.zeros(72, 72), r"tensor mtp.fc.weight has shape \[72, 72\]"),
        (f"{LAYER}self_attn.q_proj.weight", torch.zeros(72, 72), r"tensor mtp.layers.0.self_attn.q_proj.weight has"),
        ("mtp.layers.1.input_layernorm.weight", torch.ones(72), "tensor mtp.layers.1.input_layernorm.weight, which a"),
        ("mtp.embed_tokens.weight", torch.ones(3), "mtp.embed_tokens.weight, which a head of Qwen3_5ForCausalLM does"),
    ],
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(
    folder: Path, name: str, tensor: torch.Tensor | None, sentence: str
) -> None:
    rewrite(folder, {name: tensor})
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)
