"""GLM-4.5: which tensors of its checkpoints are passed over, in what its correction is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Attention, Experts
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config, parse_config
from runahead.runtime.models.weights import check_weights, described
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.public_configs import PUBLIC
from tests.runtime.models.test_config_keys import GLM4_MOE, parse

CASE = next(case for case in CASES if case.name == "glm4_moe")


def with_tensors(folder: Path, *names: str, **changes: Any) -> Path:
    """A checkpoint of three layers that has these tensors besides, and these keys of config.json."""
    save(CASE, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, **{name: torch.ones(2) for name in names}}, file, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return folder


def check(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    check_weights(checkpoint, load_config(checkpoint))


def test_layers_behind_the_last_are_passed_over_as_many_as_are_named(tmp_path: Path) -> None:
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight")
    check(with_tensors(tmp_path / "one", *names))
    check(with_tensors(tmp_path / "two", *names, "model.layers.4.enorm.weight", num_nextn_predict_layers=2))
    with pytest.raises(
        CheckpointError, match=r"has a tensor model\.layers\.4\.enorm\.weight, which Glm4MoeForCausalLM"
    ):
        check(with_tensors(tmp_path / "more", *names, "model.layers.4.enorm.weight"))
    with pytest.raises(CheckpointError, match=r"has a tensor model\.layers\.3\.e\w+\.weight, which Glm4MoeForCausalLM"):
        check(with_tensors(tmp_path / "none", names[0], num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match=r"has a tensor model\.layers\.2\.eh_proj\.weight"):
        check(with_tensors(tmp_path / "within", "model.layers.2.eh_proj.weight"))


def test_corrections_are_float32_whatever_the_model_is_served_in(tmp_path: Path) -> None:
    oracle = save(CASE, tmp_path)
    model = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.bfloat16, "auto", ReferenceKernels())
    feed_forward = model.weights.layers[1].feed_forward
    assert isinstance(feed_forward, Experts)
    correction = feed_forward.choice.correction
    assert correction is not None and correction.dtype is torch.float32
    assert torch.equal(correction, oracle.model.layers[1].mlp.gate.e_score_correction_bias)
    assert not torch.equal(correction, correction.bfloat16().float()), "as if nothing could have been rounded"


def test_a_model_without_shared_experts_has_none() -> None:
    model = described(parse_config({**PUBLIC["GLM-4.5 Air"], "n_shared_experts": 0}, ()))
    feed_forward = model.layers[-1].feed_forward
    assert isinstance(feed_forward, Experts) and feed_forward.shared is None


def test_heads_are_normed_and_queries_biased_as_the_file_says() -> None:
    for name, normed in (("GLM-4.5 Air", False), ("GLM-4.5", True)):
        mixer = described(parse_config(PUBLIC[name], ())).layers[0].mixer
        assert isinstance(mixer, Attention)
        assert (mixer.q_norm is not None) == (mixer.k_norm is not None) == normed
        assert mixer.qkv.bias is not None and mixer.o.bias is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group is 3, and there are 128 experts; groups must be alike, each of two at least"),
        ({"n_group": 128}, "n_group is 128, and there are 128 experts; groups must be alike"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5, and n_group is 4"),
        ({"n_group": 32}, r"num_experts_per_tok is 8, and topk_group \(1\) groups have 4 experts"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129, and there are 128 experts"),
        ({"n_routed_experts": 16, "num_local_experts": 8}, "n_routed_experts and num_local_experts contradict each"),
        ({"num_nextn_predict_layers": 1, "num_mtp_layers": 2}, "num_nextn_predict_layers and num_mtp_layers contra"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0; it must be a number above 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be an integer of at least 0"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor rotates 1 of 16 numbers"),
        ({"sliding_window": 9}, "not understood for Glm4MoeForCausalLM .*: sliding_window"),
        ({"scoring_func": "softmax"}, "not understood for Glm4MoeForCausalLM .*: scoring_func"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
    ],
    ids=str,
)
def test_what_contradicts_itself_or_is_not_understood_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(GLM4_MOE, **changes)
