"""What `config.json` and the settings show to be impossible is refused before a weight is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.parts import MAX_EOS_IDS
from runahead.runtime.wire.engine_config import MAX_CONTEXT, ConfigError, EngineConfig

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
    assemble(EngineConfig(model=str(folder), threads=1, **settings), lambda done, total: None)


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({}, {"context_length": 257}, r"context_length \(257\) is more than the model's 256"),
        (
            {"max_position_embeddings": 1 << 33},
            {},
            f"the model's context is {1 << 33} tokens; set context_length to {MAX_CONTEXT} or less",
        ),
        ({}, {"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"max_position_embeddings": 1 << 22}, {}, r"memory holds \d+ KV blocks; one request of 4194304 tokens needs"),
        ({"eos_token_id": list(range(MAX_EOS_IDS + 1))}, {}, f"the model names {MAX_EOS_IDS + 1} end-of-sequence ids"),
    ],
    ids=["context", "the model's own context", "blocks", "memory", "end tokens"],
)
def test_what_cannot_be_is_refused_before_the_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(tmp_path, {**CONFIG, **changes}, **settings)


def test_what_can_be_gets_as_far_as_the_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        start(tmp_path, CONFIG, context_length=256, max_rows=16, num_blocks=17)
