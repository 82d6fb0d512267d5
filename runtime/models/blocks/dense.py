"""What the files of dense decoders share: most keys of `config.json`, and layers of attention and a gated feed-forward
under the names that Llama gave its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Activation, Attention, AttentionShape, Dense, Layer, Norm
from runahead.runtime.kernels.share import ShareError
from runahead.runtime.models.architecture import ModelWeights, TensorReader
from runahead.runtime.models.blocks.mixer_shares import part_of_heads, part_of_width, places_of
from runahead.runtime.models.blocks.partial_rope import norm_in_order, order_of_qkv, rotated_of
from runahead.runtime.models.config.keys import READ_BY_ALL
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.config.rope_values import check_factors, rope
from runahead.runtime.models.config.values import common, flag, number
from runahead.runtime.models.rope import Rope, RopeScaling

# What dense decoders read, beside what every architecture reads.
READ_BY_DENSE: Final = READ_BY_ALL.union(
    "intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta "
    "rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings sliding_window "
    "use_sliding_window layer_types".split()
)

_KV_HEADS: Final = "num_key_value_heads"
_WINDOW: Final = "sliding_window"
# Older checkpoints carry what a decoder computes by itself.
_ROTARY_CACHE: Final = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    """A dense decoder: every layer an attention and a gated feed-forward. What an architecture always has or never has,
    its file says.

    windows: by layer, how many tokens a token attends to; 0 is all before it. rotated: numbers of a head that are
    rotated, its first; None: all. attention_bias: of queries, keys, values and the attention's output. mlp_bias: of the
    feed-forward.
    """

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    windows: tuple[int, ...]
    rotated: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False


ConfigT = TypeVar("ConfigT", bound=DenseConfig)  # with what an architecture has of its own
# By layer: of config.json, the name of the architecture and the number of layers.
Windows = Callable[[Mapping[str, Any], str, int], tuple[int, ...]]
RopeReader = Callable[[Mapping[str, Any], int], tuple[float, RopeScaling]]  # of config.json and the model's positions
LayerOf = Callable[[ConfigT, int, TensorReader], Layer]  # of a layer's number


def read_dense(
    kind: type[ConfigT],
    raw: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    *,
    architecture: str,
    kv_heads: int | None,
    positions: int,
    windows: Windows,
    query_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    rope: RopeReader = rope,
    share: float | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    flags: tuple[str, ...] = (),
    **own: Any,
) -> ConfigT:
    """What `config.json` says of a dense decoder.

    query_heads, kv_heads, positions, head_dim, vocab, eps, tied: what the keys count as where the file lacks them. None
    is as many heads for keys as for queries, and hidden_size shared among these; how many of these there are, and how
    many tokens, the file must say then. rope: reads theta and its scaling. share: of a head, that is rotated; None: all
    of it. activation: its key, and the one that there is. flags: keys of biases, false where the file lacks them. own:
    the fields that `kind` has beside those of `DenseConfig`. Raises CheckpointError.
    """
    key, only = activation
    if raw.get(key, only) != only:
        raise CheckpointError(f"{key} is {raw[key]!r}; only {only!r} is supported")
    fields = common(raw, eos_token_ids, architecture=architecture, positions=positions, vocab=vocab, tied=tied)
    heads = number(raw, "num_attention_heads", int, query_heads)
    kv_heads = number({_KV_HEADS: raw.get(_KV_HEADS, kv_heads)}, _KV_HEADS, int, heads)
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    head_dim = number(raw, "head_dim", int, fields["hidden_size"] // heads if head_dim is None else head_dim)
    if head_dim % 2:
        raise CheckpointError(f"head_dim must be even, and is {head_dim}")
    theta, scaling = rope(raw, fields["max_position_embeddings"])
    check_factors(scaling, int(head_dim * (1.0 if share is None else share)) // 2)
    return kind(
        **fields,
        intermediate_size=number(raw, "intermediate_size", int),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", float, eps),
        rope_theta=theta,
        rope_scaling=scaling,
        windows=windows(raw, architecture, fields["num_layers"]),
        rotated=None if share is None else rotated_of(head_dim, share),
        **{**own, **{key: flag(raw, key) for key in flags}},
    )


# ------------------------------------------------------------ windows


def window_switch(raw: Mapping[str, Any]) -> bool | None:
    """`use_sliding_window`; None where it is absent or null."""
    return None if raw.get("use_sliding_window") is None else flag(raw, "use_sliding_window")


def window_size(given: Any) -> int:
    """A number of tokens that `sliding_window` gives; 0 for null."""
    return 0 if given is None else number({_WINDOW: given}, _WINDOW, int)


def windows_by_type(raw: Mapping[str, Any], architecture: str, layers: int, window: int) -> tuple[int, ...] | None:
    """By layer, as `layer_types` says; None where the file lacks it."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in tuple(known) for kind in kinds):
        raise CheckpointError(
            f"layer_types is {kinds!r}; it must name {' or '.join(known)} for each of {layers} layers"
        )
    if not window and "sliding_attention" in kinds:
        raise CheckpointError(
            f"layer_types has sliding_attention, and {architecture} has no sliding window here: sliding_window is "
            f"{raw.get(_WINDOW)!r}, use_sliding_window {raw.get('use_sliding_window')!r}"
        )
    return tuple(known[kind] for kind in kinds)


def all_tokens(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Of families whose files have no key of a window: every layer attends to all tokens."""
    return (0,) * layers


def one_window(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Of Mixtral and Phi-3: what `sliding_window` says holds on every layer; there is none where the file lacks it."""
    return (window_size(raw.get(_WINDOW)),) * layers


def no_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Of Llama: every layer attends to all tokens."""
    given, switch = raw.get(_WINDOW), window_switch(raw)
    if given is not None or switch:
        name = "use_sliding_window" if given is None else _WINDOW
        raise CheckpointError(
            f"{name} is {raw[name]!r}, and {architecture} attends to all tokens; only null is supported"
        )
    return windows_by_type(raw, architecture, layers, 0) or (0,) * layers


def numbered_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Of Mistral: a window counts where `sliding_window` is a number, which it is where the file lacks it."""
    given, switch = raw.get(_WINDOW, 4096), window_switch(raw)
    window = window_size(given)
    if switch is not None and switch != bool(window):
        raise CheckpointError(
            f"use_sliding_window is {switch} and sliding_window {given!r}, a contradiction: {architecture} has a "
            "window if sliding_window is a number"
        )
    return windows_by_type(raw, architecture, layers, window) or (window,) * layers


def switched_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Of Qwen: a window counts where it is switched on, by `layer_types` or else from `max_window_layers` on."""
    given = raw.get(_WINDOW, 4096)
    window = window_size(given) if window_switch(raw) else 0
    named = windows_by_type(raw, architecture, layers, window)
    if named is not None:
        return named
    if not window:
        return (0,) * layers
    first = number(raw, "max_window_layers", int, 28, low=0)
    return tuple(window if layer >= first else 0 for layer in range(layers))


# ------------------------------------------------------------ tensors and layers


def dense_weights(
    config: ConfigT,
    tensors: TensorReader,
    layer: LayerOf[ConfigT],
    *ropes: Rope,
    embedding_scale: float = 1.0,
    final_norm: str = "model.norm",
) -> ModelWeights:
    """The embedding, the layers and the head, or the rank's part: its tokens of the vocabulary. ropes: none: the one
    that the configuration names. Raises ShareError."""
    vocab, hidden, own = config.vocab_size, config.hidden_size, None
    if not tensors.share.is_whole:
        own = places_of(tensors.share.part_of(vocab, "tokens of the vocabulary"))
    embedding = tensors.tensor(("model.embed_tokens.weight",), (vocab,), hidden, own=own)
    layers = tuple(layer(config, i, tensors) for i in range(config.num_layers))
    last = tensors.norm(final_norm, hidden, config.rms_norm_eps)
    tied = config.tie_word_embeddings
    head = tensors.pack(embedding if tied else tensors.tensor(("lm_head.weight",), (vocab,), hidden, own=own))
    return ModelWeights(embedding, layers, last, head, ropes or (rope_of(config),), tensors.parameters, embedding_scale)


def rope_of(config: DenseConfig) -> Rope:
    return Rope(config.head_dim, config.rope_theta, config.rope_scaling, config.rotated)


def attention(
    config: DenseConfig,
    layer: int,
    tensors: TensorReader,
    *,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    head_norms: bool = False,
    norms_span_heads: bool = False,
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    scale: float | None = None,
    rope: int = 0,
    norm: str | None = "input_layernorm",
    post_norm: str | None = None,
    inputs: int = 0,
) -> Attention:
    """The attention of a layer, or the rank's heads of it. qkv_bias, output_bias: None: as the configuration says.
    head_norms: queries and keys are normalised, each head, or all of a token's together if norms_span_heads.
    projections: what the layer calls those of queries, keys and values; one has them all. scale: of the scores; None is
    1 over the square root of head_dim. rope: which of the model's. norm, post_norm: what the layer calls those that it
    has. inputs: of queries, keys and values; 0: hidden_size. Raises ShareError."""
    own = f"model.layers.{layer}."
    prefix, hidden, eps = f"{own}self_attn.", config.hidden_size, config.rms_norm_eps
    qkv_bias = config.attention_bias if qkv_bias is None else qkv_bias
    output_bias = config.attention_bias if output_bias is None else output_bias
    if norms_span_heads and not tensors.share.is_whole:
        raise ShareError(
            f"{tensors.share.of} ranks can't have parts of {config.architecture}: its norms of queries and keys are "
            "taken over all heads of a token, which no rank has"
        )
    scale = config.head_dim**-0.5 if scale is None else scale
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale)
    q_width, k_width = (shape.q_size, shape.kv_size) if norms_span_heads else (shape.head_dim, shape.head_dim)
    rows: tuple[int, ...] = (shape.q_size, shape.kv_size, shape.kv_size)
    rows = rows if len(projections) == len(rows) else (sum(rows),)
    names = tuple(prefix + name for name in projections)
    part, outputs, attended = part_of_heads(shape, tensors.share)
    order = order_of_qkv(shape, config.rotated)
    if outputs is not None:
        order = outputs if order is None else order[outputs]

    def head_norm(name: str, width: int) -> Norm | None:
        return norm_in_order(tensors.norm(prefix + name, width, eps), config.rotated) if head_norms else None

    return Attention(
        part,
        config.windows[layer],
        norm=None if norm is None else tensors.norm(own + norm, hidden, eps),
        qkv=tensors.linear(names, rows, inputs or hidden, bias=qkv_bias, own=order),
        q_norm=head_norm("q_norm", q_width),
        k_norm=head_norm("k_norm", k_width),
        o=tensors.linear((f"{prefix}o_proj",), (hidden,), shape.q_size, bias=output_bias, inputs=attended),
        rope=rope,
        post_norm=None if post_norm is None else tensors.norm(own + post_norm, hidden, eps),
        norms_span_heads=norms_span_heads,
        kv_scales=tensors.kv_scales(prefix, shape.kv_heads),
    )


def feed_forward(
    config: DenseConfig,
    layer: int,
    tensors: TensorReader,
    *,
    block: str = "mlp",
    projections: tuple[str, ...] = ("gate_proj", "up_proj"),
    activation: Activation = "silu",
    norm: str | None = "post_attention_layernorm",
    post_norm: str | None = None,
) -> Dense:
    """The gated feed-forward of a layer, or the rank's part of its width. block: what the layer calls it. projections:
    what it calls those of gate and up; one has both. norm, post_norm: what the layer calls those that it has."""
    own, hidden, width = f"model.layers.{layer}.", config.hidden_size, config.intermediate_size
    prefix, eps, bias = f"{own}{block}.", config.rms_norm_eps, config.mlp_bias
    rows = (width, width) if len(projections) == 2 else (2 * width,)
    outputs, inputs = part_of_width(width, tensors.share)
    return Dense(
        None if norm is None else tensors.norm(own + norm, hidden, eps),
        tensors.linear(tuple(prefix + name for name in projections), rows, hidden, bias=bias, own=outputs),
        tensors.linear((f"{prefix}down_proj",), (hidden,), width, bias=bias, inputs=inputs),
        None if post_norm is None else tensors.norm(own + post_norm, hidden, eps),
        activation,
    )


def passed_over(config: DenseConfig, name: str) -> bool:
    """A copy of a tied matrix, and what a decoder computes by itself."""
    return (config.tie_word_embeddings and name == "lm_head.weight") or bool(_ROTARY_CACHE.fullmatch(name))
