"""A checkpoint of several parts: its text part is served as if it lay alone, and other parts are passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config as WholeConfig
from transformers import Gemma3ForConditionalGeneration, Gemma3TextConfig

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.families.gemma import Gemma3Config
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config, parse_config
from tests.runtime.models.checkpoints import BASE, CASES, save
from tests.runtime.models.public_configs import PUBLIC

NAMES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
}
# With what the text's tensors begin in place of `model.`, a key beside the text, and a tensor of pictures.
WAYS = (
    ("qwen3_5", "model.language_model.", "image_token_id", "model.visual.patch_embed.proj.weight"),
    ("qwen3_5_moe", "model.language_model.", "image_token_id", "model.visual.patch_embed.proj.weight"),
    ("gemma3", "model.language_model.", "image_token_index", "model.multi_modal_projector.mm_soft_emb_norm.weight"),
    ("gemma3", "language_model.model.", "image_token_index", "vision_tower.vision_model.post_layernorm.bias"),
)


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    decoder = load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    return Trial(decoder, [list(range(20))], 20, 16, seed=0).advance([(0, 20)])[0]


def wrap(
    folder: Path, kind: str, begin: str = WAYS[0][1], key: str = WAYS[0][2], of_pictures: str = WAYS[0][3]
) -> None:
    """Make of a text's checkpoint one of text and pictures, as they are published: Qwen's with a layer of guesses."""
    text = json.loads((folder / "config.json").read_text())
    eos = text.pop("eos_token_id")
    text.pop("architectures")
    whole = {"architectures": [NAMES[kind]], "model_type": kind, "text_config": text, "eos_token_id": eos}
    whole |= {"vision_config": {"depth": 1}, key: 7}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    tensors = {
        name.replace("model.", begin, 1) if "language_model" not in name else name: tensor
        for name, tensor in tensors.items()
    }
    tensors[of_pictures] = torch.zeros(2, 2)
    if kind != "gemma3":
        tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]}, {way[1]}")
def test_the_text_of_a_checkpoint_with_pictures_is_served_as_if_it_lay_alone(
    way: tuple[str, str, str, str], tmp_path: Path
) -> None:
    save(next(case for case in CASES if case.name == way[0]), tmp_path)
    config, alone = load_config(open_checkpoint(tmp_path)), logits(tmp_path)
    wrap(tmp_path, *way)
    assert load_config(open_checkpoint(tmp_path)) == config
    assert torch.equal(logits(tmp_path), alone)


def test_a_tensor_that_is_neither_the_texts_nor_of_pictures_is_refused_by_name(tmp_path: Path) -> None:
    save(next(case for case in CASES if case.name == "gemma3"), tmp_path)
    wrap(tmp_path, *WAYS[3][:3], "audio_tower.norm.weight")
    with pytest.raises(
        CheckpointError, match=r"has a tensor audio_tower\.norm\.weight, which Gemma3ForCausalLM does not"
    ):
        logits(tmp_path)


def test_a_tensor_that_is_there_by_both_of_its_names_is_refused(tmp_path: Path) -> None:
    save(next(case for case in CASES if case.name == "gemma3"), tmp_path)
    wrap(tmp_path, *WAYS[3])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.language_model.norm.weight"] = tensors["language_model.model.norm.weight"] + 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"language_model\.norm\.weight .* the same one of the text, model\.norm"):
        logits(tmp_path)


def test_gemma_3_with_pictures_has_the_logits_that_transformers_gives_a_text(tmp_path: Path) -> None:
    pictures = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = next(case for case in CASES if case.name == "gemma3").changes
    config = WholeConfig(
        text_config={**BASE, **text}, vision_config={**pictures, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=BASE["vocab_size"] - 1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.arange(20)[None]).logits[0, -1]
    torch.testing.assert_close(logits(tmp_path)[-1], expected, rtol=2e-4, atol=2e-4)


def test_what_a_published_file_leaves_out_is_as_the_library_has_it() -> None:
    found = parse_config(PUBLIC["Gemma 3 4B"], (1, 106))
    assert isinstance(found, Gemma3Config)
    expected = Gemma3TextConfig(**PUBLIC["Gemma 3 4B"]["text_config"])
    assert (found.vocab_size, found.num_heads, found.num_kv_heads) == (
        expected.vocab_size, expected.num_attention_heads, expected.num_key_value_heads
    )  # fmt: skip
    assert (found.head_dim, found.rms_norm_eps) == (expected.head_dim, expected.rms_norm_eps)
    assert found.max_position_embeddings == expected.max_position_embeddings == 131072
    assert [window > 0 for window in found.windows] == [
        kind == "sliding_attention" for kind in expected.layer_types or ()
    ]
    assert found.rope_scaling.factor == 8.0 and found.sliding_scaling.factor == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is None; in Qwen3_5ForConditionalGeneration it must describe"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'; Qwen3_5ForConditionalGeneration has 'qwen3_5'"),
        ({"audio_config": {}}, "not understood for Qwen3_5ForConditionalGeneration .*: audio_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and False in text_config: they contradict"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config is 'hqq'"),
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
