"""Dense decoders: common keys of `config.json`, and layers of attention and a gated feed-forward under Llama's tensor
names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Activation, Attention, AttentionShape, Dense, Experts, Layer, Norm
from runahead.runtime.kernels.ranks import ShardError
from runahead.runtime.models.architecture import EMBEDDING, LM_HEAD, ModelWeights, TensorReader, computed
from runahead.runtime.models.blocks.mixer_shards import part_of_heads, part_of_width
from runahead.runtime.models.blocks.partial_rope import norm_in_order, order_of_qkv, rotated_of
from runahead.runtime.models.config.keys import READ_BY_ALL
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.config.rope_values import check_factors, rope
from runahead.runtime.models.config.values import by_layer, common, flag, number
from runahead.runtime.models.rope import Rope, RopeScaling

# Keys of dense decoders in addition to every architecture's.
READ_BY_DENSE: Final = READ_BY_ALL.union(
    "intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta "
    "rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings sliding_window "
    "use_sliding_window layer_types".split()
)

_KV_HEADS: Final = "num_key_value_heads"
_WINDOW: Final = "sliding_window"

_Part = TypeVar("_Part", Attention, Dense, Experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    """A dense decoder: every layer has attention and a gated feed-forward. The architecture's file sets what is
    constant.

    windows: by layer, visible tokens; 0: all. rotated: rotated numbers of a head, the first ones; None: all.
    attention_bias: of queries, keys, values and the attention's output. mlp_bias: of the feed-forward.
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


ConfigT = TypeVar("ConfigT", bound=DenseConfig)  # with an architecture's further fields
# Returns windows by layer, from config.json, the architecture's name and the number of layers.
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
    rotary_fraction: float | None = None,
    required_activation: tuple[str, str] = ("hidden_act", "silu"),
    flags: tuple[str, ...] = (),
    **more: Any,
) -> ConfigT:
    """Read a dense decoder from `config.json`.

    query_heads, kv_heads, positions, head_dim, vocab, eps, tied: defaults of missing keys. None: as many KV heads as
    query heads, and hidden_size divided by these; the number of query heads and positions are then required. rope:
    reads theta and its scaling. rotary_fraction: rotated fraction of a head; None: all. required_activation: key and
    the only supported value; the layer's is an argument of `feed_forward`. flags: keys of biases, false if missing.
    more: fields of `kind` in addition to `DenseConfig`'s. Raises CheckpointError.
    """
    key, only = required_activation
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
    check_factors(scaling, int(head_dim * (1.0 if rotary_fraction is None else rotary_fraction)) // 2)
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
        rotated=None if rotary_fraction is None else rotated_of(head_dim, rotary_fraction),
        **{**more, **{key: flag(raw, key) for key in flags}},
    )


# ------------------------------------------------------------ windows


def window_switch(raw: Mapping[str, Any]) -> bool | None:
    """Return `use_sliding_window`, None if absent or null."""
    return None if raw.get("use_sliding_window") is None else flag(raw, "use_sliding_window")


def window_size(given: Any) -> int:
    """Return the tokens of `sliding_window`; 0 for null."""
    return 0 if given is None else number({_WINDOW: given}, _WINDOW, int)


def windows_by_type(raw: Mapping[str, Any], architecture: str, layers: int, window: int) -> tuple[int, ...] | None:
    """Return windows by layer from `layer_types`; None if the file lacks it."""
    found = by_layer(raw, layers, {"full_attention": 0, "sliding_attention": window})
    if not window and found is not None and "sliding_attention" in raw["layer_types"]:
        raise CheckpointError(
            f"layer_types has sliding_attention, and {architecture} has no sliding window here: sliding_window is "
            f"{raw.get(_WINDOW)!r}, use_sliding_window {raw.get('use_sliding_window')!r}"
        )
    return found


def all_tokens(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return no windows, for families without a window key."""
    return (0,) * layers


def one_window(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return `sliding_window` for every layer, none if the file lacks it (Mixtral, Phi-3)."""
    return (window_size(raw.get(_WINDOW)),) * layers


def no_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return no windows, and refuse a window key (Llama). Raises CheckpointError."""
    given, switch = raw.get(_WINDOW), window_switch(raw)
    if given is not None or switch:
        name = "use_sliding_window" if given is None else _WINDOW
        raise CheckpointError(
            f"{name} is {raw[name]!r}, and {architecture} attends to all tokens; only null is supported"
        )
    return windows_by_type(raw, architecture, layers, 0) or (0,) * layers


def numbered_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return a window for every layer if `sliding_window` is a number, the default (Mistral). Raises
    CheckpointError.
    """
    given, switch = raw.get(_WINDOW, 4096), window_switch(raw)
    window = window_size(given)
    if switch is not None and switch != bool(window):
        raise CheckpointError(
            f"use_sliding_window is {switch} and sliding_window {given!r}, a contradiction: {architecture} has a "
            "window if sliding_window is a number"
        )
    return windows_by_type(raw, architecture, layers, window) or (window,) * layers


def switched_windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return windows if they are switched on, by `layer_types` or from layer `max_window_layers` on (Qwen)."""
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
    """Build the embedding, the layers and the head, or the rank's part of them. ropes: empty: the configuration's.
    Raises ShardError.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding, whole_embedding = tensors.of_tokens(EMBEDDING, vocab, hidden)
    layers = tuple(layer(config, i, tensors) for i in range(config.num_layers))
    last = tensors.norm(final_norm, hidden, config.rms_norm_eps)
    rows, whole = embedding, whole_embedding
    if not config.tie_word_embeddings:
        rows, whole = tensors.of_tokens(LM_HEAD, vocab, hidden)
    lm_head = tensors.pack(rows)
    return ModelWeights(
        embedding, layers, last, lm_head, ropes or (rope_of(config),), tensors.parameters, whole_embedding,
        lm_head if whole is rows else tensors.pack(whole), embedding_scale,
    )  # fmt: skip


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
    """Build a layer's attention, or the rank's heads of it. qkv_bias, output_bias: None: from the configuration.
    head_norms: normalize queries and keys, each head, or all heads of a token together if norms_span_heads.
    projections: tensor names of queries, keys and values, or of one for all. scale: of the scores; None: 1 /
        sqrt(head_dim). rope: index of the model's. norm, post_norm: tensor names. inputs: of queries, keys and values;
        0: hidden_size. Raises ShardError.
    """
    begin = f"model.layers.{layer}."
    prefix, hidden, eps = f"{begin}self_attn.", config.hidden_size, config.rms_norm_eps
    qkv_bias = config.attention_bias if qkv_bias is None else qkv_bias
    output_bias = config.attention_bias if output_bias is None else output_bias
    if norms_span_heads and not tensors.shard.is_whole:
        raise ShardError(
            f"{tensors.shard.of} ranks can't have parts of {config.architecture}: its norms of queries and keys are "
            "taken over all heads of a token, which no rank has"
        )
    scale = config.head_dim**-0.5 if scale is None else scale
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale)
    q_width, k_width = (shape.q_size, shape.kv_size) if norms_span_heads else (shape.head_dim, shape.head_dim)
    rows: tuple[int, ...] = (shape.q_size, shape.kv_size, shape.kv_size)
    rows = rows if len(projections) == len(rows) else (sum(rows),)
    names = tuple(prefix + name for name in projections)
    part, outputs, attended = part_of_heads(shape, tensors.shard)
    order = order_of_qkv(shape, config.rotated)
    if outputs is not None:
        order = outputs if order is None else order[outputs]

    def head_norm(name: str, width: int) -> Norm | None:
        return norm_in_order(tensors.norm(prefix + name, width, eps), config.rotated) if head_norms else None

    return Attention(
        part,
        config.windows[layer],
        norm=None if norm is None else tensors.norm(begin + norm, hidden, eps),
        qkv=tensors.linear(names, rows, inputs or hidden, bias=qkv_bias, own=order),
        q_norm=head_norm("q_norm", q_width),
        k_norm=head_norm("k_norm", k_width),
        o=tensors.linear((f"{prefix}o_proj",), (hidden,), shape.q_size, bias=output_bias, inputs=attended),
        rope=rope,
        post_norm=None if post_norm is None else tensors.norm(begin + post_norm, hidden, eps),
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
    """Build a layer's gated feed-forward, or the rank's part of its width. block: tensor prefix. projections: names of
    gate and up, or of one for both. norm, post_norm: tensor names.
    """
    begin, hidden, width = f"model.layers.{layer}.", config.hidden_size, config.intermediate_size
    prefix, eps, bias = f"{begin}{block}.", config.rms_norm_eps, config.mlp_bias
    rows = (width, width) if len(projections) == 2 else (2 * width,)
    outputs, inputs = part_of_width(width, tensors.shard)
    return Dense(
        None if norm is None else tensors.norm(begin + norm, hidden, eps),
        tensors.linear(tuple(prefix + name for name in projections), rows, hidden, bias=bias, own=outputs),
        tensors.linear((f"{prefix}down_proj",), (hidden,), width, bias=bias, inputs=inputs),
        None if post_norm is None else tensors.norm(begin + post_norm, hidden, eps),
        activation,
    )


def with_one_added(part: _Part) -> _Part:
    """Return the block with 1 added to its norms' weights, in float32: a sum near one would lose digits of weights near
    zero.
    """
    parts = {one.name: getattr(part, one.name) for one in fields(part)}
    norms: dict[str, Any] = {name: one_added(norm) for name, norm in parts.items() if isinstance(norm, Norm)}
    return replace(part, **norms)


def one_added(norm: Norm) -> Norm:
    return Norm(computed(norm.weight, lambda weight: weight + 1.0), norm.eps)
