"""An architecture is its file and a line of the registry: nothing else needs to know of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.architecture import Architecture, ModelWeights, TensorReader, small
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    attention,
    dense_weights,
    feed_forward,
    read_dense,
    windows_by_type,
)
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire.engine_config import EngineConfig
from tests.project.repository import ROOT
from tests.runtime.models.checkpoints import CASES, save

NEW = "OtherForCausalLM"
QWEN3 = next(case for case in CASES if case.name == "qwen3_wide_heads")


def logits(folder: Path) -> torch.Tensor:
    decoder = load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    return Trial(decoder, [list(range(20))], 20, 16, seed=0).advance([(0, 20)])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConfig(ModelConfig):
    """What an architecture has of its own, in which nobody else finds heads, windows or rotations."""

    inner: DenseConfig


def own_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> OwnConfig:
    inner = ARCHITECTURES["Qwen3ForCausalLM"].read(raw, eos_token_ids)
    common = {field.name: getattr(inner, field.name) for field in fields(ModelConfig)}
    return OwnConfig(**{**common, "architecture": NEW}, inner=inner)


NAMES = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mimo": "MiMoForCausalLM"}  # which transformers does not have
OWN: Architecture[OwnConfig] = Architecture(
    name=NEW,
    model_type="other",
    models="Others",
    understood=ARCHITECTURES["Qwen3ForCausalLM"].understood,
    unread=(),
    read=own_config,
    weights=lambda config, tensors: dense_weights(config.inner, tensors, layer),
    small=lambda config, tokens: replace(config, num_layers=1, inner=small(config.inner, tokens)),
)


def layer(config: DenseConfig, number: int, tensors: TensorReader) -> Layer:
    return Layer(attention(config, number, tensors, head_norms=True), feed_forward(config, number, tensors))


def weights(config: DenseConfig, tensors: TensorReader) -> ModelWeights:
    return dense_weights(config, tensors, layer)


def test_each_line_has_the_name_and_the_type_that_transformers_gives_it() -> None:
    for name, found in ARCHITECTURES.items():
        assert name == found.name == NAMES[found.model_type]


def test_each_line_has_a_row_in_the_documents_with_a_test_that_serves_it() -> None:
    rows = re.findall(r"^\| `(\w+ForCausalLM)` \| (.+) \| (.+) \|$", (ROOT / "docs" / "models.md").read_text(), re.M)
    assert [name for name, _, _ in rows] == list(ARCHITECTURES)
    served: dict[str, set[str]] = {}
    for case in CASES:
        name = NAMES[case.written.get("model_type", case.config.model_type)]
        served.setdefault(name, set()).add(f"`{case.name}`")
    assert {name: set(tests.split(", ")) for name, _, tests in rows} == served


def test_the_table_at_the_front_has_each_line_once_and_counts_the_tests_that_serve_it() -> None:
    table = re.findall(r"^\| .+ \| (`\w+ForCausalLM`.*) \| (\d+) \|$", (ROOT / "README.md").read_text(), re.M)
    rows = [(re.findall(r"`(\w+)`", names), int(count)) for names, count in table]
    assert sorted(name for names, _ in rows for name in names) == sorted(ARCHITECTURES)
    served = Counter(NAMES[case.written.get("model_type", case.config.model_type)] for case in CASES)
    assert [count for _, count in rows] == [sum(served[name] for name in names) for names, _ in rows]


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
        load_config(open_checkpoint(tmp_path))

    line = replace(
        ARCHITECTURES["MistralForCausalLM"],
        name=NEW,
        model_type="other",
        understood=READ_BY_DENSE,
        read=lambda raw, eos: read_dense(
            DenseConfig,
            raw,
            eos,
            architecture=NEW,
            kv_heads=None,
            positions=256,
            windows=lambda raw, name, layers: windows_by_type(raw, name, layers, 0) or (0,) * layers,
        ),
        weights=weights,
    )
    monkeypatch.setitem(ARCHITECTURES, NEW, line)
    assert load_config(open_checkpoint(tmp_path)).architecture == NEW
    with torch.inference_mode():
        assert torch.equal(logits(tmp_path), expected)


def test_what_an_architecture_alone_knows_is_asked_for_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(QWEN3, tmp_path)
    expected = logits(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [NEW], "model_type": "other"}))
    monkeypatch.setitem(ARCHITECTURES, NEW, OWN)
    assert type(load_config(open_checkpoint(tmp_path))) is OwnConfig
    with torch.inference_mode():
        assert torch.equal(logits(tmp_path), expected)
    parts = assemble(
        EngineConfig(model=str(tmp_path), max_rows=4, num_blocks=40, device="cpu", threads=1), lambda done, total: None
    )
    parts.device.close()
    assert parts.info.architecture == NEW
