"""A checkpoint of several parts: its text part is served as if it lay alone, and other parts are passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config, parse_config
from runahead.runtime.models.trial import Trial
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.public_configs import PUBLIC

NAMES = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    decoder = load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    return Trial(decoder, [list(range(20))], 20, 16, seed=0).advance([(0, 20)])[0]


def wrap(folder: Path, kind: str) -> None:
    """Make of a text's checkpoint one of text and pictures, with a layer of guesses, as they are published."""
    text = json.loads((folder / "config.json").read_text())
    eos = text.pop("eos_token_id")
    text.pop("architectures")
    whole = {"architectures": [NAMES[kind]], "model_type": kind, "text_config": text, "eos_token_id": eos}
    whole |= {"vision_config": {"depth": 1}, "image_token_id": 7}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    tensors = {
        name.replace("model.", "model.language_model.", 1) if "language_model" not in name else name: tensor
        for name, tensor in tensors.items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", NAMES)
def test_the_text_of_a_checkpoint_with_pictures_is_served_as_if_it_lay_alone(kind: str, tmp_path: Path) -> None:
    save(next(case for case in CASES if case.name == kind), tmp_path)
    config, alone = load_config(open_checkpoint(tmp_path)), logits(tmp_path)
    wrap(tmp_path, kind)
    assert load_config(open_checkpoint(tmp_path)) == config
    assert torch.equal(logits(tmp_path), alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is None; that of Qwen3_5ForConditionalGeneration must say what its text"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'; that of Qwen3_5ForConditionalGeneration is 'qwen3_5'"),
        ({"audio_config": {}}, "not understood for Qwen3_5ForConditionalGeneration .*: audio_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and False in text_config: they contradict"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is 'fp8'"),
    ],
    ids=str,
)
def test_what_stands_beside_the_text_is_understood_or_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config({**PUBLIC["Qwen3.5 27B"], **changes}, ())


def test_a_key_of_the_text_that_is_not_understood_is_refused_by_name() -> None:
    text = {**PUBLIC["Qwen3.5 27B"]["text_config"], "a_switch_of_tomorrow": 1}
    with pytest.raises(CheckpointError, match=r"not understood for Qwen3_5ForCausalLM .*: a_switch_of_tomorrow"):
        parse_config({**PUBLIC["Qwen3.5 27B"], "text_config": text}, ())
