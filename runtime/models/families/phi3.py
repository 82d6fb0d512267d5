"""Phi-3 and Phi-4: a Llama with fused tensors of queries, keys and values, and of gate and up, and optional partial
rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, TensorReader
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    attention,
    dense_weights,
    feed_forward,
    one_window,
    read_dense,
)
from runahead.runtime.models.blocks.partial_rope import share_of
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.rope_values import rope_object, rope_scaling
from runahead.runtime.models.config.values import number
from runahead.runtime.models.rope import RopeScaling

_NAME: Final = "Phi3ForCausalLM"
_PARTIAL: Final = "partial_rotary_factor"
_ORIGINAL: Final = "original_max_position_embeddings"
# Code that checkpoints name, which is not run: transformers has it under the same names.
_CODE: Final = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": f"modeling_phi3.{_NAME}"}


def _rope(raw: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling]:
    """Read the rope. Longrope has two older names. Its original length is beside the object, or 4096."""
    key, found = rope_object(raw)
    names = {name: "longrope" for name in ("type", "rope_type") if found.get(name) in ("su", "yarn")}
    original = number(raw, _ORIGINAL, int, 4096)
    theta = number(found if found.get("rope_theta") is not None else raw, "rope_theta", float, 10000.0)
    scaling = rope_scaling(key, {**found, **names, _ORIGINAL: original}, positions)
    if scaling.kind not in ("default", "longrope"):
        raise CheckpointError(f"{key} has rope_type {scaling.kind!r}; {_NAME} has default or longrope")
    return theta, scaling


def _refuse_other_code(raw: Mapping[str, Any]) -> None:
    named = raw.get("auto_map") or {}
    for key, code in _CODE.items():
        found = named.get(key, code) if isinstance(named, dict) else named
        if not isinstance(found, str) or found.split("--")[-1] != code:
            raise CheckpointError(f"auto_map names {found!r}, code of the checkpoint's own, which is never run")


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> DenseConfig:
    _refuse_other_code(raw)
    return read_dense(
        DenseConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=None, positions=4096, windows=one_window,
        eps=1e-5, rope=_rope, share=share_of(raw),
    )  # fmt: skip


def _layer(config: DenseConfig, number: int, tensors: TensorReader) -> Layer:
    mixer = attention(config, number, tensors, projections=("qkv_proj",))
    return Layer(mixer, feed_forward(config, number, tensors, projections=("gate_up_proj",)))


PHI3: Final = Architecture(
    name=_NAME,
    model_type="phi3",
    models="Phi-3, Phi-3.5 and Phi-4, mini and 14B",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE - {"use_sliding_window", "layer_types"} | {"auto_map"},
    unread=(
        unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias"),
        unread("Of training: nothing is dropped at inference.", "resid_pdrop embd_pdrop"),
    ),
    read=_read,
    weights=partial(dense_weights, layer=_layer),
)
