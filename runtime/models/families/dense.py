"""Decoders that differ only in values: Llama, Qwen2 and Qwen3, Mistral, OLMo 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import Architecture, TensorReader
from runahead.runtime.models.blocks.dense import (
    READ_BY_DENSE,
    DenseConfig,
    Windows,
    attention,
    dense_weights,
    feed_forward,
    no_windows,
    numbered_windows,
    read_dense,
    switched_windows,
)
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, Unread, unread

_NOTHING: Final[Mapping[str, Any]] = {}


def _layers_of(
    mixer: Mapping[str, Any], second: Mapping[str, Any]
) -> Callable[[DenseConfig, int, TensorReader], Layer]:
    def layer(config: DenseConfig, number: int, tensors: TensorReader) -> Layer:
        return Layer(attention(config, number, tensors, **mixer), feed_forward(config, number, tensors, **second))

    return layer


def _dense(
    name: str,
    model_type: str,
    models: str,
    *,
    windows: Windows,
    kv_heads: int | None,
    positions: int,
    flags: tuple[str, ...] = (),
    window_keys: tuple[str, ...] = (),
    unread: tuple[Unread, ...] = (),
    mixer: Mapping[str, Any] = _NOTHING,
    second: Mapping[str, Any] = _NOTHING,
    **read: Any,
) -> Architecture[DenseConfig]:
    """Make a line of the registry. flags, read: arguments of `read_dense`. window_keys: further keys that `windows`
    reads. mixer, second: arguments of `attention` and `feed_forward`.
    """
    return Architecture(
        name=name,
        model_type=model_type,
        models=models,
        layers=("attention", "dense") if windows is no_windows else ("attention", "window", "dense"),
        understood=READ_BY_DENSE.union(flags, window_keys),
        unread=unread,
        read=partial(
            read_dense, DenseConfig, architecture=name, kv_heads=kv_heads, positions=positions, windows=windows,
            flags=flags, **read,
        ),
        weights=partial(dense_weights, layer=_layers_of(mixer, second)),
    )  # fmt: skip


_NO_BIAS: Final = unread(BIASES_AS_THEY_ARE, "attention_bias mlp_bias")
_mistral = partial(_dense, kv_heads=8, positions=131072, windows=numbered_windows, unread=(_NO_BIAS,))
_qwen = partial(
    _dense, kv_heads=32, positions=32768, windows=switched_windows, window_keys=("max_window_layers",)
)  # fmt: skip

LLAMA: Final = _dense(
    "LlamaForCausalLM",
    "llama",
    "Llama 1 to 3.3, SmolLM2, TinyLlama, Falcon 3, DeepSeek's distillations, and others of its shape",
    windows=no_windows,
    kv_heads=None,
    positions=2048,
    flags=("attention_bias", "mlp_bias"),
    unread=(unread("From which layer on a window holds: every layer attends to all tokens.", "max_window_layers"),),
)
QWEN2: Final = _qwen(
    "Qwen2ForCausalLM",
    "qwen2",
    "Qwen2, Qwen2.5 and DeepSeek's distillations",
    unread=(_NO_BIAS,),
    mixer={"qkv_bias": True},
)
QWEN3: Final = _qwen(
    "Qwen3ForCausalLM",
    "qwen3",
    "Qwen3 without experts",
    head_dim=128,
    flags=("attention_bias",),
    unread=(unread(BIASES_AS_THEY_ARE, "mlp_bias"),),
    mixer={"head_norms": True},
)
MISTRAL: Final = _mistral("MistralForCausalLM", "mistral", "Mistral 7B, Mistral Nemo, and others of its shape")
# A Mistral whose file lists the layers with a window.
MINISTRAL: Final = _mistral("MinistralForCausalLM", "ministral", "Ministral 8B, where its layers are named")
# Its norms follow attention and feed-forward; norms of queries and keys span all heads of a token.
OLMO2: Final = _dense(
    "Olmo2ForCausalLM",
    "olmo2",
    "OLMo 2",
    windows=no_windows,
    kv_heads=None,
    positions=2048,
    eps=1e-5,
    flags=("attention_bias",),
    mixer={
        "head_norms": True, "norms_span_heads": True, "norm": None, "post_norm": "post_attention_layernorm",
    },
    second={"norm": None, "post_norm": "post_feedforward_layernorm"},
)  # fmt: skip
