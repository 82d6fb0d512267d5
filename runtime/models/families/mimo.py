"""MiMo: Qwen2's layers, and a head that predicts the token after next from the last hidden state.

The head is one more layer of the same kind, over input_proj([hidden_layernorm(previous hidden state),
token_layernorm(embedding)]), with the hidden state after the model's final norm; final_layernorm follows, and the
model's matrix gives logits.

Source: Xiaomi LLM-Core Team, 2025, "MiMo: Unlocking the Reasoning Potential of Language Model", and the model
definition published with the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from runahead.runtime.kernels.layers import Fuse, Layer
from runahead.runtime.models.architecture import Architecture, HeadWeights, OwnHeads, TensorReader
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    attention,
    dense_weights,
    feed_forward,
    read_dense,
    rope_of,
    switched_windows,
)
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.values import number, refuse_other_code

_NAME: Final = "MiMoForCausalLM"
_CODE: Final = {
    "AutoConfig": "configuration_mimo.MiMoConfig",
    "AutoModel": "modeling_mimo.MiMoModel",
    "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
}
_HEADS, _HEAD, _LAYER = "model.mtp_layers.", "model.mtp_layers.0.", "model.layers.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class MiMoConfig(DenseConfig):
    """MiMo's fields. heads: successive draft heads."""

    heads: int


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> MiMoConfig:
    refuse_other_code(raw, _CODE)
    heads = number(raw, "num_nextn_predict_layers", int, 0, low=0)
    return read_dense(
        MiMoConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=32, positions=32768, windows=switched_windows,
        heads=heads,
    )  # fmt: skip


def _layer(config: MiMoConfig, layer: int, tensors: TensorReader) -> Layer:
    return Layer(attention(config, layer, tensors, qkv_bias=True), feed_forward(config, layer, tensors))


def _head(config: MiMoConfig, tensors: TensorReader) -> HeadWeights:
    width, eps = config.hidden_size, config.rms_norm_eps
    fuse = Fuse(
        tensors.linear((f"{_LAYER}input_proj",), (width,), 2 * width, bias=False),
        tensors.norm(f"{_LAYER}token_layernorm", width, eps),
        tensors.norm(f"{_LAYER}hidden_layernorm", width, eps),
        hidden_first=True,
    )
    # The first drafted token follows the first token, which has no entry.
    mixer = replace(attention(config, 0, tensors, qkv_bias=True), first=1)
    dense = feed_forward(config, 0, tensors)
    norm = tensors.norm(f"{_LAYER}final_layernorm", width, eps)
    return HeadWeights(
        fuse, mixer, dense, rope_of(config), tensors.parameters, width, norm=norm, passes_normed=True
    )  # fmt: skip


MIMO: Final = Architecture(
    name=_NAME,
    model_type="mimo",
    models="MiMo 7B",
    layers=("attention", "window", "dense"),
    understood=READ_BY_DENSE | {"max_window_layers", "num_nextn_predict_layers", "auto_map"},
    unread=(unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias"),),
    read=_read,
    weights=partial(dense_weights, layer=_layer),
    beside=lambda config: (_HEADS,),
    heads=OwnHeads(
        count=lambda config: config.heads,
        build=_head,
        begins=_HEAD,
        named=lambda name: _LAYER + name.removeprefix(_HEAD),
        in_file=lambda name: _HEAD + name.removeprefix(_LAYER),
    ),
)
