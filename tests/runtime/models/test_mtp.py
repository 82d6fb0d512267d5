"""Heads that come with a model's checkpoint: served, passed over, and refused, each by its own sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.drafters.mtp import comes_with_head, names_head, open_mtp
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.read_config import load_config, parse_config
from runahead.runtime.models.weights import check_weights
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire.engine_config import EngineConfig
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.eagle_heads import HIDDEN
from tests.runtime.models.mimo_heads import BEGIN, random_head, save_with_head
from tests.runtime.models.public_configs import PUBLIC
from tests.runtime.models.test_eagle import as_it_is

HEAD = random_head()


def opened(folder: Path, **changes: Any) -> HeadFiles:
    """changes: of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    return open_mtp(checkpoint, load_config(checkpoint), "--drafter mtp", has_weights=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_with_head(tmp_path, HEAD)
    return tmp_path


def test_its_tensors_are_those_of_the_checkpoint(folder: Path) -> None:
    weights = opened(folder).weights(as_it_is)
    assert weights.parameters == sum(tensor.numel() for tensor in HEAD.values())
    product = weights.fuse.product
    assert product is not None and torch.equal(product.weight, HEAD[f"{BEGIN}input_proj.weight"])
    assert (weights.embedding, weights.lm_head) == (None, None)


def test_the_model_without_a_drafter_passes_over_its_head(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    config = load_config(checkpoint)
    assert check_weights(checkpoint, config).keys() >= HEAD.keys()
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.other.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"has a tensor model.other.weight, which MiMoForCausalLM does not know"):
        check_weights(open_checkpoint(folder), config)


def test_it_takes_of_a_block_what_it_is_said_to(folder: Path) -> None:
    head = opened(folder)
    weights = head.weights(as_it_is)
    cache = memory_of((Layer(weights.mixer, weights.feed_forward),)).make_cache(
        3, 16, torch.float32, torch.device("cpu")
    )
    kept = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) + 3 * 16 * HIDDEN * 4
    assert 3 * head.block_bytes(16) == kept


def test_it_is_drawn_where_the_model_is_drawn_and_no_file_is_looked_at(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder)
    head = open_mtp(checkpoint, load_config(checkpoint), "--drafter mtp", has_weights=False)
    one, again = head.weights(as_it_is, drawn=True), head.weights(as_it_is, drawn=True)
    assert one.parameters == sum(tensor.numel() for tensor in HEAD.values())
    assert torch.equal(one.mixer.o.weight, again.mixer.o.weight)


@pytest.mark.parametrize(("name", "comes"), [("MiMo 7B", True), ("Qwen3 0.6B", False)])
def test_who_comes_with_a_head_says_so(name: str, comes: bool) -> None:
    assert names_head(parse_config(PUBLIC[name], ())) == comes


def test_a_head_that_would_be_refused_does_not_come_with_the_model(folder: Path) -> None:
    config = load_config(open_checkpoint(folder))
    assert comes_with_head(open_checkpoint(folder), config, has_weights=True)
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name not in HEAD}, path)
    assert not comes_with_head(open_checkpoint(folder), config, has_weights=True)
    assert comes_with_head(open_checkpoint(folder), config, has_weights=False), "it would be drawn"
    with pytest.raises(CheckpointError, match=r"lacks it: there is no tensor model.mtp_layers.0.input_proj.weight"):
        opened(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_nextn_predict_layers": 0}, r"--drafter mtp .* by its config.json .* has no head"),
        ({"num_nextn_predict_layers": 2}, r"--drafter mtp .* has 2 heads, which guess one after the other"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1; it must be an integer of at least 0"),
    ],
)
def test_a_checkpoint_without_one_head_is_refused(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder, **changes)


def test_a_model_that_comes_with_no_heads_is_refused(tmp_path: Path) -> None:
    save(CASES[0], tmp_path)
    with pytest.raises(
        CheckpointError, match=r"LlamaForCausalLM has none that is served; MiMoForCausalLM, .* have one"
    ):
        opened(tmp_path)
    drawn: Literal["auto", "dummy"]
    for drawn in ("auto", "dummy"):
        config = EngineConfig(model=str(tmp_path), drafter="mtp", load_format=drawn, device="cpu", threads=1)
        with pytest.raises(CheckpointError, match=r"^drafter mtp drafts with a head that comes with the checkpoint"):
            assemble(config, lambda done, total: None)


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("input_proj.weight", None, "has no tensor model.mtp_layers.0.input_proj.weight"),
        ("input_proj.weight", torch.zeros(HIDDEN, HIDDEN), r"tensor .*0.input_proj.weight has shape \[64, 64\]"),
        ("self_attn.q_proj.bias", None, "has no tensor model.mtp_layers.0.self_attn.q_proj.bias"),
        (
            "norm.weight",
            torch.ones(3),
            "tensor model.mtp_layers.0.norm.weight, which a head of MiMo",
        ),
    ],
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(
    folder: Path, name: str, tensor: torch.Tensor | None, sentence: str
) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), BEGIN + name: tensor}
    save_file({key: value for key, value in tensors.items() if value is not None}, path)
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)
