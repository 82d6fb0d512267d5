"""An architecture is its file and a line of the registry: nothing else needs to know of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.architecture import ModelWeights, TensorReader
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.config_keys import READ_BY_ALL
from runahead.runtime.models.dense_decoder import attention, dense_weights, feed_forward, read_dense, windows_by_type
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.models.trial import Trial
from tests.runtime.models.checkpoints import CASES, save

NEW = "OtherForCausalLM"
QWEN3 = next(case for case in CASES if case.name == "qwen3_wide_heads")


def logits(folder: Path) -> torch.Tensor:
    decoder = load_model(folder, torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    return Trial(decoder, [list(range(20))], 20, 16, seed=0).advance([(0, 20)])[0]


def layer(config: ModelConfig, number: int, tensors: TensorReader) -> Layer:
    return Layer(attention(config, number, tensors, head_norms=True), feed_forward(config, number, tensors))


def weights(config: ModelConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, layer)


def test_each_line_has_the_name_and_the_type_that_transformers_gives_it() -> None:
    classes = (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig)
    assert [found.model_type for found in ARCHITECTURES.values()] == [found.model_type for found in classes]
    assert all(name == found.name for name, found in ARCHITECTURES.items())


def test_an_architecture_is_served_by_its_file_and_its_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(QWEN3, tmp_path)
    expected = logits(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    unwanted = ("attention_bias", "max_window_layers")
    raw = {key: value for key, value in raw.items() if key not in unwanted}
    path.write_text(json.dumps({**raw, "architectures": [NEW], "model_type": "other"}))
    with pytest.raises(CheckpointError, match=rf"architectures is \['{NEW}'\]; supported are Llama"):
        load_config(tmp_path)

    line = replace(
        ARCHITECTURES["MistralForCausalLM"],
        name=NEW,
        model_type="other",
        understood=READ_BY_ALL,
        read=lambda raw, eos: read_dense(
            raw,
            eos,
            architecture=NEW,
            kv_heads=None,
            positions=256,
            windows=lambda raw, layers: windows_by_type(raw, NEW, layers, 0) or (0,) * layers,
        ),
        weights=weights,
    )
    monkeypatch.setitem(ARCHITECTURES, NEW, line)
    assert load_config(tmp_path).architecture == NEW
    with torch.inference_mode():
        assert torch.equal(logits(tmp_path), expected)
