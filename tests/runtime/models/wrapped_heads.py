"""Draft heads in the format of Speculators, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.runtime.models.eagle3_heads import KNOWN
from tests.runtime.models.eagle_heads import CONFIG, write_head

_ALONE = dict.fromkeys(CONFIG)  # keys that a head by itself has, and a wrapped one not


def wrapped(kind: str, layer: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """Of `config.json`. layer: of the head."""
    own: dict[str, Any] = {"architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "layernorms": False}
    if kind == "eagle3":
        own = {
            "architectures": ["Eagle3DraftModel"], "draft_vocab_size": KNOWN, "norm_before_residual": False,
            "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None,
        }  # fmt: skip
    method = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        **own, "speculators_model_type": kind, "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/model"},
        },
        "transformer_layer_config": {key: value for key, value in layer.items() if key != "architectures"},
    }  # fmt: skip


def in_wrapped_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A head of EAGLE-1 by the names that its tensors have there."""
    renamed = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    return {
        next((other + name.removeprefix(begin) for begin, other in renamed.items() if name.startswith(begin)), name): t
        for name, t in tensors.items()
    }


def write_wrapped(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """As `write_head`, of EAGLE-1."""
    return write_head(folder, in_wrapped_names(tensors), **{**_ALONE, **wrapped("eagle"), **changes})


def write_wrapped3(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """As `write_head3`, of EAGLE-3."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return write_head(folder, renamed, **{**_ALONE, **wrapped("eagle3"), **changes})
