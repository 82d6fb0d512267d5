"""Experts whose router scores each by itself, by the logistic function, and chooses by groups and by a correction that
was trained to spread its choices; beside them one that every token gets. What `config.json` and the tensors call them
is the same in all families that have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import ExpertActivation, Experts, Linear, SharedExpert
from runahead.runtime.models.architecture import TensorReader
from runahead.runtime.models.blocks.experts import read_choice
from runahead.runtime.models.config.values import flag, number

_EXPERTS: Final = "n_routed_experts", "num_local_experts"  # the makers' name, and another that transformers takes
_GROUPS, _CHOSEN_GROUPS, _SCALE = "n_group", "topk_group", "routed_scaling_factor"
READ_BY_CORRECTED: Final = frozenset(
    (*_EXPERTS, _GROUPS, _CHOSEN_GROUPS, _SCALE, "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedExperts:
    """Of a layer. experts: how many. chosen: experts of a token. size: intermediate numbers of an expert. renormalised,
    groups, chosen_groups, scale: as `Choice` has them. shared_size: intermediate numbers of what every token gets; 0:
    there is none."""

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
    """experts, chosen, size: where the file does not say. Raises CheckpointError."""
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
    """The experts of a layer, or the rank's own, and what every token gets, which is the first rank's; no tensor of
    other ranks is asked for. Raises ShareError. first: what an expert calls the projections of gate and up, or
    of what it has in their place. shared_bias: of what every token gets."""
    own = f"model.layers.{layer}."
    block, count, width = f"{own}mlp.", config.experts, config.size
    each = [f"{block}experts.{number}." for number in tensors.share.part_of(count, "experts")]
    rows = (width,) * len(first)
    correction = tensors.tensor((f"{block}gate.e_score_correction_bias",), (count,), dtype=torch.float32)
    return Experts(
        norm=tensors.norm(f"{own}post_attention_layernorm", hidden, eps),
        router=tensors.linear((f"{block}gate",), (count,), hidden, bias=False, dequantized=True),
        gate_up=tensors.linears([tuple(prefix + name for name in first) for prefix in each], rows, hidden),
        down=tensors.linears([(f"{prefix}down_proj",) for prefix in each], (hidden,), width),
        choice=Choice(
            config.chosen,
            config.renormalised,
            "logistic",
            correction,
            config.groups,
            config.chosen_groups,
            config.scale,
        ),
        shared=_shared(config.shared_size, hidden, f"{block}shared_experts.", tensors, first, bias=shared_bias),
        activation=activation,
        share=tensors.share,
    )


def _shared(
    width: int, hidden: int, prefix: str, tensors: TensorReader, first: tuple[str, ...], *, bias: bool
) -> SharedExpert | None:
    if not width or not tensors.share.is_first:
        return None

    def linear(names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Linear:
        return tensors.linear(tuple(prefix + name for name in names), rows, columns, bias=bias, dequantized=True)

    return SharedExpert(linear(first, (width,) * len(first), hidden), linear(("down_proj",), (hidden,), width))
