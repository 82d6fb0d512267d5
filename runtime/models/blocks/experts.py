"""Mixture-of-experts feed-forwards: keys of `config.json`, and layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError, StoredTensor
from runahead.runtime.checkpoint.quantized.tensor import QuantizedTensor
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import ExpertActivation, Experts, Linear, Norm, SharedExpert
from runahead.runtime.models.architecture import TensorReader
from runahead.runtime.models.blocks.dense import READ_BY_DENSE, DenseConfig
from runahead.runtime.models.blocks.mixer_shards import part_of_width
from runahead.runtime.models.config.keys import unread
from runahead.runtime.models.config.values import flag, listed_layers, number

_OF_AN_EXPERT: Final = "intermediate numbers of an expert"
_CHOSEN: Final = "num_experts_per_tok"
_STACKED: Final = re.compile(r"(?P<of>model\.layers\.\d+\.mlp\.experts)\.(?:(?P<first>gate_up_proj)|down_proj)")
# No class of `transformers` reads `layer_types` for them.
READ_BY_EXPERTS: Final = (READ_BY_DENSE | {_CHOSEN}) - {"layer_types"}
ROUTERS_IN_TRAINING: Final = unread(
    "Of a router in training: what it returns beside the logits, and losses and noise that spread its choices.",
    "output_router_logits router_aux_loss_coef router_jitter_noise",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(DenseConfig):
    """A decoder with experts in some layers.

    experts: of such a layer. chosen: of a token. expert_size: intermediate size. renormalised: a token's weights are
    divided by their sum. sparse: by layer, whether it has experts.
    """

    experts: int
    chosen: int
    expert_size: int
    renormalised: bool
    sparse: tuple[bool, ...]


def read_choice(raw: Mapping[str, Any], keys: tuple[str, ...], experts: int, chosen: int) -> dict[str, Any]:
    """Read the fields `experts` and `chosen`. keys: possible keys of the number of experts. experts, chosen: defaults.
    Raises CheckpointError.
    """
    given = {key: number(raw, key, int) for key in keys if raw.get(key) is not None}
    if len(set(given.values())) > 1:
        raise CheckpointError(f"{' and '.join(given)} contradict each other: {given}")
    count = next(iter(given.values()), experts)
    each = number(raw, _CHOSEN, int, chosen)
    if each > count:
        raise CheckpointError(f"{_CHOSEN} is {each}, and there are {count} experts")
    return {"experts": count, "chosen": each}


def read_sparse(raw: Mapping[str, Any], dense_key: str, step_key: str) -> tuple[bool, ...]:
    """Return by layer whether it has experts: every `step_key`-th, except those in `dense_key`. Raises
    CheckpointError.
    """
    layers, step = number(raw, "num_hidden_layers", int), number(raw, step_key, int, 1)
    dense = listed_layers(raw, dense_key, layers)
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def experts(
    config: ExpertsConfig,
    layer: int,
    tensors: TensorReader,
    *,
    block: str,
    projections: tuple[str, str, str],
    router: Linear | None = None,
) -> Experts:
    """Build a layer's experts, or the rank's part of their widths. block: tensor prefix of experts and router.
    projections: names of gate, up and down. router: None: read it here. Raises ShardError.
    """
    own, hidden = f"model.layers.{layer}.", config.hidden_size
    each = [f"{own}{block}.experts.{number}." for number in range(config.experts)]
    if router is None:
        router = tensors.linear((f"{own}{block}.gate",), (config.experts,), hidden, bias=False, dequantized=True)
    norm = tensors.norm(f"{own}post_attention_layernorm", hidden, config.rms_norm_eps)
    choice = Choice(config.chosen, config.renormalised)
    return experts_of(norm, router, choice, each, projections, config.expert_size, hidden, tensors)


def experts_of(
    norm: Norm, router: Linear, choice: Choice, each: Sequence[str], projections: tuple[str, ...], size: int,
    hidden: int, tensors: TensorReader, activation: ExpertActivation = "silu",
) -> Experts:  # fmt: skip
    """Build experts without a shared one, or the rank's part of their widths. each: tensor prefix of each expert.
    projections: names of gate and up, or of the projection instead, and of down. size: intermediate size. Raises
    ShardError.
    """
    *first, last = projections
    outputs, inputs = part_of_width(size, tensors.shard, pieces=len(first), what=_OF_AN_EXPERT)
    names = [tuple(prefix + name for name in first) for prefix in each]
    return Experts(
        norm=norm,
        router=router,
        gate_up=tensors.linears(names, (size,) * len(first), hidden, own=outputs),
        down=tensors.linears([(prefix + last,) for prefix in each], (hidden,), size, inputs=inputs),
        choice=choice,
        activation=activation,
    )


def one_by_one(config: ExpertsConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Split stacked expert tensors with the names of Qwen3-Next and Qwen3.5."""
    return unstacked(stored, _STACKED, config.experts, config.expert_size, config.hidden_size)


def unstacked(
    stored: Mapping[str, StoredTensor], stacked_name: re.Pattern[str], experts: int, width: int, hidden: int
) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors by name, with stacked experts, [experts, out, in] of gate and up or of down,
    split into each expert's gate_proj, up_proj and down_proj. stacked_name: its groups are `of`, before the experts'
    numbers, and `first` for gate and up. Raises CheckpointError for a tensor of another shape.
    """
    found: dict[str, StoredTensor] = {}
    of_first = (2 * width, hidden, (("gate_proj", 0, width), ("up_proj", width, 2 * width)))
    of_last = (hidden, width, (("down_proj", 0, hidden),))
    for name, tensor in stored.items():
        stacked = stacked_name.fullmatch(name)
        if stacked is None or not isinstance(tensor, SafetensorsTensor | QuantizedTensor):
            found[name] = tensor
            continue
        rows, columns, names = of_first if stacked["first"] else of_last
        tensor.check((experts, rows, columns))
        for expert in range(experts):
            for part, begin, end in names:
                own = f"{stacked['of']}.{expert}.{part}.weight"
                if own in stored:
                    raise CheckpointError(f"tensor {own} is there twice: by itself, and in {name}")
                found[own] = tensor.rows_of(expert, begin, end)
    return found


_EXPERTS: Final = "n_routed_experts", "num_local_experts"  # the authors' name, and an alias of transformers
_GROUPS, _CHOSEN_GROUPS, _SCALE = "n_group", "topk_group", "routed_scaling_factor"
READ_BY_CORRECTED: Final = frozenset(
    (*_EXPERTS, _GROUPS, _CHOSEN_GROUPS, _SCALE, "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedExperts:
    """A layer's experts. experts: how many. chosen: of a token. size: intermediate size. renormalised, groups,
    chosen_groups, scale: see `Choice`. shared_size: intermediate size of the shared expert; 0: none.
    """

    experts: int
    chosen: int
    size: int
    renormalised: bool
    groups: int
    chosen_groups: int
    scale: float
    shared_size: int


def read_corrected(
    raw: Mapping[str, Any], *, experts: int, chosen: int, size: int, shared_size: int
) -> CorrectedExperts:
    """Read corrected experts. experts, chosen, size: defaults. Raises CheckpointError."""
    choice = read_choice(raw, _EXPERTS, experts=experts, chosen=chosen)
    found = CorrectedExperts(
        experts=choice["experts"],
        chosen=choice["chosen"],
        size=number(raw, "moe_intermediate_size", int, size),
        renormalised=flag(raw, "norm_topk_prob", default=True),
        groups=number(raw, _GROUPS, int, 1),
        chosen_groups=number(raw, _CHOSEN_GROUPS, int, 1),
        scale=number(raw, _SCALE, float, 1.0),
        shared_size=shared_size,
    )
    each, rest = divmod(found.experts, found.groups)
    if rest or (found.groups > 1 and each < 2):
        raise CheckpointError(
            f"{_GROUPS} is {found.groups}, and there are {found.experts} experts; groups must be alike, each of two at "
            "least"
        )
    if found.chosen_groups > found.groups:
        raise CheckpointError(f"{_CHOSEN_GROUPS} is {found.chosen_groups}, and {_GROUPS} is {found.groups}")
    if found.chosen > each * found.chosen_groups:
        raise CheckpointError(
            f"num_experts_per_tok is {found.chosen}, and {_CHOSEN_GROUPS} ({found.chosen_groups}) groups have "
            f"{each * found.chosen_groups} experts"
        )
    return found


def corrected_experts(
    config: CorrectedExperts,
    hidden: int,
    eps: float,
    layer: int,
    tensors: TensorReader,
    *,
    first: tuple[str, ...],
    activation: ExpertActivation,
    shared_bias: bool = False,
) -> Experts:
    """Build a layer's experts and shared expert, or the rank's part of their widths. first: names of gate and up, or of
    the projection instead. shared_bias: of the shared expert. Raises ShardError.
    """
    own, count, projections = f"model.layers.{layer}.", config.experts, (*first, "down_proj")
    block = f"{own}mlp."
    correction = tensors.tensor((f"{block}gate.e_score_correction_bias",), (count,), dtype=torch.float32)
    norm = tensors.norm(f"{own}post_attention_layernorm", hidden, eps)
    router = tensors.linear((f"{block}gate",), (count,), hidden, bias=False, dequantized=True)
    groups = config.groups, config.chosen_groups
    choice = Choice(config.chosen, config.renormalised, "logistic", correction, *groups, config.scale)
    each = [f"{block}experts.{number}." for number in range(count)]
    found = experts_of(norm, router, choice, each, projections, config.size, hidden, tensors, activation)
    if not config.shared_size:
        return found
    prefix = f"{block}shared_experts."
    return replace(
        found, shared=shared_expert(config.shared_size, hidden, prefix, tensors, projections, bias=shared_bias)
    )


def shared_expert(
    width: int,
    hidden: int,
    prefix: str,
    tensors: TensorReader,
    projections: tuple[str, ...],
    *,
    bias: bool = False,
    pieces: int = 0,
    gate: torch.Tensor | None = None,
    dequantized: bool = True,
) -> SharedExpert:
    """Build a layer's shared expert, or the rank's part of its width. projections: names of gate and up, or of the
    projection instead, and of down. pieces: of the first product if one tensor has several; 0: one a tensor. gate:
    [hidden]. dequantized: see `TensorReader.linear`. Raises ShardError.
    """
    *first, last = (prefix + name for name in projections)
    pieces = pieces or len(first)
    outputs, inputs = part_of_width(width, tensors.shard, pieces=pieces, what="intermediate numbers of a shared expert")
    rows = (pieces * width // len(first),) * len(first)
    return SharedExpert(
        tensors.linear(tuple(first), rows, hidden, bias=bias, own=outputs, dequantized=dequantized),
        tensors.linear((last,), (hidden,), width, bias=bias, inputs=inputs, dequantized=dequantized),
        gate,
    )
