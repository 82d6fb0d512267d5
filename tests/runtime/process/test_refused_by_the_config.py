"""What `config.json` and the settings show to be impossible is refused before a weight is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.process import cpu
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.parts import MAX_EOS_IDS
from runahead.runtime.wire.engine_config import MAX_CONTEXT, ConfigError, EngineConfig
from runahead.service.settings.settings import engine_config, load_settings
from tests.runtime.models.checkpoints import CASES, save

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
}


def start(folder: Path, config: dict[str, Any], **settings: Any) -> None:
    """Start an engine on a folder that holds a `config.json` and nothing else."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assemble(EngineConfig(**{"model": str(folder), "device": "cpu", **settings}), lambda done, total: None)


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({}, {"context_length": 257}, r"context_length \(257\) is more than the model's 256"),
        (
            {"max_position_embeddings": 1 << 30},
            {},
            f"the model's context is {1 << 30} tokens; set context_length to {MAX_CONTEXT} or less",
        ),
        ({}, {"num_blocks": 1}, "num_blocks must be at least 2"),
        (
            {"max_position_embeddings": 1 << 22},
            {},
            r"memory holds \d+ KV blocks; one request of 4194304 tokens needs",
        ),
        ({"eos_token_id": list(range(MAX_EOS_IDS + 1))}, {}, f"the model names {MAX_EOS_IDS + 1} end-of-sequence ids"),
    ],
    ids=["context", "the model's own context", "blocks", "memory", "end tokens"],
)
def test_what_cannot_be_is_refused_before_the_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(tmp_path, {**CONFIG, **changes}, **settings)


def test_a_tensor_that_does_not_fit_is_refused_before_kernels_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CASES[0], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(cpu, "tried_kernels", lambda *given, **named: pytest.fail("kernels were tried"))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape \[96, 64\]; config\.json asks for"):
        start(tmp_path, {**config, "intermediate_size": 128})


def test_what_can_be_gets_as_far_as_the_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        start(tmp_path, CONFIG, context_length=256, max_rows=16, num_blocks=17)


@pytest.mark.parametrize(
    ("changes", "settings", "name", "sentence"),
    [
        ({}, {"context_length": "257"}, "context_length", "{} (257) is more than the model's 256"),
        ({"max_position_embeddings": 1 << 30}, {}, "context_length", "; set {} to 4194304 or less"),
        (
            {"max_position_embeddings": 1 << 22},
            {},
            "context_length",
            "needs 262145: set {} to less",
        ),
        ({}, {"device": "cuda"}, "device", "{} cuda: torch "),
    ],
    ids=["context", "the model's own context", "memory", "no GPU"],
)
@pytest.mark.parametrize("given_by", ["flag", "variable", "file"])
def test_a_setting_is_called_what_the_user_called_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    settings: dict[str, str],
    name: str,
    sentence: str,
    given_by: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags: dict[str, object] = {"model": str(tmp_path)}
    environment, config_file = dict[str, str](), tmp_path / "settings.toml"
    called = f"--{name.replace('_', '-')}"  # whoever has not given it is told its flag
    if given_by == "flag" or not settings:
        flags |= settings
    elif given_by == "variable":
        environment = {f"RUNAHEAD__{key.upper()}": value for key, value in settings.items()}
        called = f"RUNAHEAD__{name.upper()}"
    else:
        values = (f"{key} = {value if value.isdigit() else repr(value)}" for key, value in settings.items())
        config_file.write_text("\n".join(values), encoding="utf-8")
        called = f"{name} in {config_file}"
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    chosen = load_settings(flags, environment, str(config_file) if config_file.exists() else None)
    with pytest.raises(ConfigError) as refused:
        assemble(engine_config(chosen), lambda done, total: None)
    assert sentence.format(called) in str(refused.value)
