"""Qwen3-Next: gated delta nets in most layers, gated attention with partial rope in the others, and experts with a
gated shared expert. Norm weights are the checkpoint's plus one.

It has a draft head: one more layer, with gated attention and the feed-forward of the first layer, over
fc([pre_fc_norm_embedding(embedding), pre_fc_norm_hidden(previous hidden state)]). That hidden state is the model's
after its final norm, or the head's after `mtp.norm`; embedding and logits use the model's matrices. `transformers`
ignores the head.

Source of the head: vLLM (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`) and SGLang (files of the same names) with the published
tensors. That the hidden state is the one after the norm was measured: with the one before it llama.cpp (pull request
24025) and LightLLM (pull request 1402) saw lower acceptance with published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import (
    Attention,
    AttentionShape,
    DeltaShape,
    Dense,
    Experts,
    Fuse,
    GatedDelta,
    Layer,
    Linear,
    Norm,
)
from runahead.runtime.models.architecture import (
    Architecture,
    HeadWeights,
    ModelWeights,
    OwnHeads,
    TensorReader,
    computed,
    joined,
)
from runahead.runtime.models.blocks.dense import (
    LayerOf,
    dense_weights,
    feed_forward,
    one_added,
    read_dense,
    rope_of,
    window_switch,
    with_one_added,
)
from runahead.runtime.models.blocks.experts import (
    READ_BY_EXPERTS,
    ROUTERS_IN_TRAINING,
    ExpertsConfig,
    experts,
    one_by_one,
    read_choice,
    read_sparse,
    shared_expert,
)
from runahead.runtime.models.blocks.mixer_shards import indexes_of, part_of_delta, part_of_heads
from runahead.runtime.models.blocks.partial_rope import head_order, norm_in_order, rotary_fraction_of
from runahead.runtime.models.config.keys import BIASES_AS_THEY_ARE, unread
from runahead.runtime.models.config.rope_values import rope_of_a_part
from runahead.runtime.models.config.values import by_layer, flag, number

_NAME: Final = "Qwen3NextForCausalLM"
_HEADS, _HEADS_LAYER, _LAYER = "mtp.", "mtp.layers.0.", "model.layers.0."
_KINDS: Final = "layer_types"
_EVERY: Final = "full_attention_interval"
_RECURRENT: Final = {"linear_attention": True, "full_attention": False}
_EXPERTS: Final = "num_experts", "num_local_experts"  # of the authors; of transformers 5
_PATTERN: Final = "mlp_only_layers", "decoder_sparse_step"
_SHARED: Final = "shared_expert_intermediate_size"
READ_OF_DELTA: Final = (
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(ExpertsConfig):
    """Qwen3-Next's fields. experts: 0 if no layer has any. recurrent: by layer, whether its mixer is a gated delta net.
    shared_size: intermediate size of the shared expert. attention_bias: also of gates. heads: successive draft heads.
    heads_embed: they have their own embedding.
    """

    recurrent: tuple[bool, ...]
    delta: DeltaShape
    shared_size: int
    heads: int = 1  # Qwen3-Next has no key for it
    heads_embed: bool = False


def read_recurrent(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return by layer whether it is recurrent, from `layer_types`; without it, every layer but each
    `full_attention_interval`-th.
    """
    layers, every = number(raw, "num_hidden_layers", int), number(raw, _EVERY, int, 4)
    found = by_layer(raw, layers, _RECURRENT)
    return tuple((layer + 1) % every != 0 for layer in range(layers)) if found is None else found


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    if window_switch(raw):
        raise CheckpointError(
            f"use_sliding_window is True, and {architecture} attends to all tokens; only false is supported"
        )
    return (0,) * layers


def read_delta(raw: Mapping[str, Any]) -> DeltaShape:
    """Read the gated delta net's shape. Raises CheckpointError."""
    defaults, low = (16, 128, 32, 128, 4), (1, 1, 1, 1, 2)
    sizes = [
        number(raw, key, int, *more) for key, more in zip(READ_OF_DELTA, zip(defaults, low, strict=True), strict=True)
    ]
    shape = DeltaShape(*sizes)
    if shape.value_heads % shape.key_heads:
        raise CheckpointError(
            f"{READ_OF_DELTA[2]} ({shape.value_heads}) must be a multiple of {READ_OF_DELTA[0]} ({shape.key_heads})"
        )
    return shape


def _read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Qwen3NextConfig:
    own: dict[str, Any] = {
        **read_choice(raw, _EXPERTS, experts=512, chosen=10),
        "expert_size": number(raw, "moe_intermediate_size", int, 512),
        "renormalised": flag(raw, "norm_topk_prob", default=True),
        "sparse": read_sparse(raw, *_PATTERN),
        "recurrent": read_recurrent(raw),
        "delta": read_delta(raw),
        "shared_size": number(raw, _SHARED, int, 512),
    }
    return read_dense(
        Qwen3NextConfig, raw, eos_token_ids, architecture=_NAME, kv_heads=2, positions=32768, windows=_windows,
        head_dim=256, rope=rope_of_a_part, rotary_fraction=rotary_fraction_of(raw, 0.25),
        flags=("attention_bias",), **own,
    )  # fmt: skip


def gated_attention(config: Qwen3NextConfig, layer: int, tensors: TensorReader) -> Attention:
    """Build a gated attention. The checkpoint has each head's query weights, then its gate weights. Raises
    ShardError.
    """
    own, hidden, eps, size = f"model.layers.{layer}.", config.hidden_size, config.rms_norm_eps, config.head_dim
    prefix, bias = f"{own}self_attn.", config.attention_bias
    shape = AttentionShape(config.num_heads, config.num_kv_heads, size, size**-0.5)
    order = head_order(size, size if config.rotated is None else config.rotated)
    part, _, attended = part_of_heads(shape, tensors.shard)
    heads = indexes_of(tensors.shard.part_of(shape.heads, "query heads"))[:, None] * 2 * size
    kv_heads = indexes_of(tensors.shard.kv_heads_of(shape.kv_heads))[:, None] * size
    queries, gates = (heads + order).flatten(), (heads + size + torch.arange(size)).flatten()
    keys, values = (kv_heads + order).flatten(), (kv_heads + torch.arange(size)).flatten()

    def parts(kind: str, *columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors of queries, keys and values together, and of gates."""
        both = torch.cat([queries, gates])
        q = tensors.tensor((f"{prefix}q_proj.{kind}",), (2 * shape.q_size,), *columns, own=both)
        k = tensors.tensor((f"{prefix}k_proj.{kind}",), (shape.kv_size,), *columns, own=keys)
        v = tensors.tensor((f"{prefix}v_proj.{kind}",), (shape.kv_size,), *columns, own=values)
        return joined([q[: queries.numel()], k, v]), q[queries.numel() :].clone()

    def head_norm(name: str) -> Norm:
        return norm_in_order(one_added(tensors.norm(f"{prefix}{name}", size, eps)), config.rotated)

    qkv, gate = parts("weight", hidden)
    qkv_bias, gate_bias = parts("bias") if bias else (None, None)
    return Attention(
        part,
        0,
        norm=one_added(tensors.norm(f"{own}input_layernorm", hidden, eps)),
        qkv=Linear(tensors.pack(qkv), qkv_bias),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        o=tensors.linear((f"{prefix}o_proj",), (hidden,), shape.q_size, bias=bias, inputs=attended),
        gate=Linear(tensors.pack(gate), gate_bias),
        kv_scales=tensors.kv_scales(prefix, shape.kv_heads),
    )


def _gated_delta(config: Qwen3NextConfig, layer: int, tensors: TensorReader) -> GatedDelta:
    """Build a gated delta net, reordering the checkpoint's queries, keys, values, z, b and dt, which are by key
    head.
    """
    shape = config.delta
    each = shape.value_heads // shape.key_heads
    values, first = each * shape.value_dim, 2 * shape.keys + 2 * shape.inner
    by_head = torch.arange(first).view(shape.key_heads, -1)
    q, k, v, z = (part.flatten() for part in by_head.split([shape.key_dim, shape.key_dim, values, values], dim=1))
    b, dt = (part.flatten() for part in (first + torch.arange(2 * shape.value_heads)).view(-1, 2 * each).chunk(2, 1))
    names, rows = ("in_proj_qkvz", "in_proj_ba"), (first, 2 * shape.value_heads)
    return gated_delta(config, layer, tensors, names, rows, torch.cat([z, q, k, v, b, dt]))


def gated_delta(
    config: Qwen3NextConfig,
    layer: int,
    tensors: TensorReader,
    projections: tuple[str, ...],
    rows: tuple[int, ...],
    order: torch.Tensor | None = None,
) -> GatedDelta:
    """Build a layer's recurrent mixer, or the rank's heads of it. projections: tensor names of its first product. rows,
    order: see `TensorReader.linear`. Raises ShardError.
    """
    own, hidden, shape = f"model.layers.{layer}.", config.hidden_size, config.delta
    prefix, eps, heads = f"{own}linear_attn.", config.rms_norm_eps, (shape.value_heads,)
    names, part = tuple(prefix + name for name in projections), part_of_delta(shape, tensors.shard)
    if part.outputs is not None:
        order = part.outputs if order is None else order[part.outputs]

    def by_head(name: str) -> torch.Tensor:
        return tensors.tensor((prefix + name,), heads, own=part.heads)

    return GatedDelta(
        part.shape,
        norm=one_added(tensors.norm(f"{own}input_layernorm", hidden, eps)),
        proj=tensors.linear(names, rows, hidden, bias=False, own=order),
        conv_weight=tensors.tensor((f"{prefix}conv1d.weight",), (shape.channels,), 1, shape.window, own=part.channels),
        a=computed(by_head("A_log"), lambda log: -torch.exp(log)),
        dt_bias=by_head("dt_bias"),
        gated_norm=tensors.norm(f"{prefix}norm", shape.value_dim, eps),
        out=tensors.linear((f"{prefix}out_proj",), (hidden,), shape.inner, bias=False, inputs=part.inner),
    )


def experts_and_shared(config: Qwen3NextConfig, layer: int, tensors: TensorReader) -> Experts:
    """Build a layer's experts and shared expert, or the rank's part of their widths. Raises ShardError."""
    block, hidden, projections = f"model.layers.{layer}.mlp.", config.hidden_size, ("gate_proj", "up_proj", "down_proj")
    router, gate = tensors.linear_and_row(f"{block}gate", f"{block}shared_expert_gate", config.experts, hidden)
    shared = shared_expert(config.shared_size, hidden, f"{block}shared_expert.", tensors, projections, gate=gate)
    return replace(experts(config, layer, tensors, block="mlp", projections=projections, router=router), shared=shared)


def dense_or_experts(config: Qwen3NextConfig, layer: int, tensors: TensorReader) -> Dense | Experts:
    """Build a layer's feed-forward."""
    if config.sparse[layer]:
        return with_one_added(experts_and_shared(config, layer, tensors))
    return with_one_added(feed_forward(config, layer, tensors))


def _layer(config: Qwen3NextConfig, number: int, tensors: TensorReader) -> Layer:
    mixer = (_gated_delta if config.recurrent[number] else gated_attention)(config, number, tensors)
    return Layer(mixer, dense_or_experts(config, number, tensors))


def delta_weights(config: Qwen3NextConfig, tensors: TensorReader, layer: LayerOf[Qwen3NextConfig]) -> ModelWeights:
    """Build the model of these layers."""
    weights = dense_weights(config, tensors, layer)
    return replace(weights, final_norm=one_added(weights.final_norm))


def _head(config: Qwen3NextConfig, tensors: TensorReader) -> HeadWeights:
    """Build the draft head. Raises CheckpointError if it has its own embedding."""
    if config.heads_embed:
        raise CheckpointError(
            "mtp_use_dedicated_embeddings is True: the head has a separate embedding; only heads that share the "
            "model's embedding are served"
        )
    width = config.hidden_size

    def norm(name: str) -> Norm:
        return one_added(tensors.norm(f"{_HEADS}{name}", width, config.rms_norm_eps))

    fuse = Fuse(
        tensors.linear((f"{_HEADS}fc",), (width,), 2 * width, bias=False),
        norm("pre_fc_norm_embedding"),
        norm("pre_fc_norm_hidden"),
    )
    # The first drafted token follows the first token, which has no entry.
    mixer = replace(gated_attention(config, 0, tensors), first=1)
    second, last = dense_or_experts(config, 0, tensors), norm("norm")
    return HeadWeights(
        fuse, mixer, second, rope_of(config), tensors.parameters, width, norm=last, passes_normed=True
    )  # fmt: skip


# Its layer has the tensor names of the model's first one.
OWN_HEADS: Final = OwnHeads(
    count=lambda config: config.heads,
    build=_head,
    begins=_HEADS,
    named=lambda name: _LAYER + name.removeprefix(_HEADS_LAYER) if name.startswith(_HEADS_LAYER) else name,
    in_file=lambda name: _HEADS_LAYER + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name,
)


QWEN3_NEXT: Final = Architecture(
    name=_NAME,
    model_type="qwen3_next",
    models="Qwen3-Next 80B-A3B",
    understood=READ_BY_EXPERTS.union(_EXPERTS, _PATTERN, READ_OF_DELTA, {_KINDS, _EVERY, _SHARED, "attention_bias"})
    .union({"moe_intermediate_size", "norm_topk_prob"})
    .difference({"sliding_window"}),
    unread=(ROUTERS_IN_TRAINING, unread(BIASES_AS_THEY_ARE, "mlp_bias")),
    read=_read,
    weights=partial(delta_weights, layer=_layer),
    layers=("attention", "gated_delta", "dense", "experts"),
    heads=OWN_HEADS,
    unstacked=one_by_one,
)
