"""Models that draft for another: served, and refused, each by its own sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BambaConfig, Qwen3Config

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.ranks import ONE_RANK
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.drafters.draft_model import DraftModelFiles, open_draft_model
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from tests.runtime.models.checkpoints import BAMBA, CASES, IDS, Case, save
from tests.runtime.ranks.segments import Segment, Turns

WORDS = {"a": 0, "b": 1, "ab": 2}
SMALLER = Case("smaller", Qwen3Config, {**IDS, "hidden_size": 48, "head_dim": 8, "num_hidden_layers": 2})


def tokenizer(folder: Path, vocabulary: Any, added: dict[str, int] | None = None) -> None:
    told = {
        "model": {"type": "BPE", "vocab": vocabulary},
        "added_tokens": [{"id": number, "content": text} for text, number in (added or {}).items()],
    }
    (folder / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")


def opened(folder: Path, context: int = 256, *, has_weights: bool = True) -> DraftModelFiles:
    of_target = open_checkpoint(folder / "target")
    return open_draft_model(
        open_checkpoint(folder / "model"), load_config(of_target), of_target, context, "--draft-model",
        "--context-length", has_weights=has_weights,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(CASES[0], tmp_path / "target")
    save(SMALLER, tmp_path / "model")
    return tmp_path


def test_it_is_loaded_with_layers_and_shapes_of_its_own(folder: Path) -> None:
    kernels = ReferenceKernels()
    target = load_model(open_checkpoint(folder / "target"), torch.device("cpu"), torch.float32, "auto", kernels)
    model = opened(folder).load(target, kernels, 128, drawn=False)
    assert len(model.weights.layers) == 2
    embedding = 160 * 48
    assert model.step_fraction == (model.parameters - embedding) / (target.num_parameters - 160 * 64)
    cache = model.make_cache(3, 16)
    kept = sum(tensor.nbytes for tensor in (*cache.entries.keys, *cache.entries.values))
    assert kept == 3 * opened(folder).block_bytes(16)
    assert cache.hidden.shape == (48, 0)


def test_a_step_is_a_larger_part_of_a_launch_of_a_target_that_ranks_divide(folder: Path) -> None:
    files, kernels, shares = opened(folder), ReferenceKernels(), []
    for ranks in (ONE_RANK, Segment(Turns(2), 0)):
        target = load_model(
            open_checkpoint(folder / "target"), torch.device("cpu"), torch.float32, "auto", kernels, ranks=ranks
        )
        shares.append(files.load(target, kernels, 128, drawn=False).step_fraction)
    assert shares[1] == 2 * shares[0]


def test_its_numbers_are_drawn_where_the_targets_are(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    kernels = ReferenceKernels()
    target = load_model(open_checkpoint(folder / "target"), torch.device("cpu"), torch.float32, "auto", kernels)
    assert opened(folder, has_weights=False).load(target, kernels, 128, drawn=True).parameters > 0
    with pytest.raises(CheckpointError, match=r"the draft model .*model: .* has neither model.safetensors"):
        opened(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 161}, "has a vocabulary of 161 tokens, and the model one of 160"),
        (
            {"max_position_embeddings": 255},
            "has a context of 255 tokens, and 256 are served: set --context-length to 255 or less",
        ),
        ({"architectures": ["MambaForCausalLM"]}, r"the draft model .*: architectures is \['MambaForCausalLM'\]"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder, has_weights=False)


def test_a_model_with_a_recurrent_state_is_refused(folder: Path) -> None:
    save(Case("recurrent", BambaConfig, {**IDS, **BAMBA}), folder / "model")
    with pytest.raises(CheckpointError, match="is of BambaForCausalLM, which keeps a recurrent state of each request"):
        opened(folder, has_weights=False)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 97}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"the draft model .* tensor model.layers.0.mlp.gate_proj.weight has"):
        opened(folder)


@pytest.mark.parametrize(
    ("own", "added", "sentence"),
    [
        (WORDS, {}, None),
        ({"a": 0, "b": 1}, {"ab": 2}, None),
        ([["a", -1.0], ["b", -2.0], ["ab", -3.0]], {}, None),
        (
            {"a": 1, "b": 0, "ab": 2},
            {},
            "2 of its tokens differ from the model's, the first of them token 0, which is 'b' there and 'a' in the",
        ),
        (WORDS, {"<end>": 3}, "1 of its tokens .* token 3, which is '<end>' there and None in the model"),
        ({}, {}, "3 of its tokens differ"),
        (7, {}, "the tokenizer of .*model has no vocabulary that can be read"),
    ],
)
def test_tokens_that_stand_for_other_texts_are_refused(
    folder: Path, own: Any, added: dict[str, int], sentence: str | None
) -> None:
    tokenizer(folder / "model", own, added)
    opened(folder)  # the target has no tokenizer: nothing is compared
    tokenizer(folder / "target", WORDS)
    if sentence is None:
        opened(folder)
        return
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)
