"""Small models that ranks have between them, of tensors that are the same for whoever asks for them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from runahead.runtime.kernels.layers import DeltaShape, GatedDelta, Layer, Mamba2, Mamba2Shape
from runahead.runtime.kernels.ranks import Shard
from runahead.runtime.models.architecture import ModelWeights, TensorReader, TensorStack
from runahead.runtime.models.blocks.experts import CorrectedExperts
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.registry import ARCHITECTURES
from tests.gpu import gpu_chain
from tests.runtime.kernels.expert_configs import GLM4_MOE
from tests.runtime.kernels.hybrid_configs import hybrid

_EXPERTS: Final = {"experts": 12, "chosen": 3, "expert_size": 16, "renormalised": True, "sparse": (False, True)}
_ROUTED: Final = CorrectedExperts(
    experts=12, chosen=3, size=16, renormalised=True, groups=4, chosen_groups=2, scale=2.5, shared_size=24
)
_MAMBA2, _DELTA = Mamba2Shape(8, 8, 4, 16, 4), DeltaShape(4, 8, 8, 16, 3)
_OF_HYBRIDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "BambaForCausalLM": {"mamba": _MAMBA2, "proj_bias": True},
    "GraniteMoeHybridForCausalLM": {"mamba": _MAMBA2, "experts": 12},
    "Qwen3NextForCausalLM": {"delta": _DELTA, **_EXPERTS},
    "Qwen3_5MoeForCausalLM": {"delta": _DELTA, **_EXPERTS, "sparse": (True, True)},
    "NemotronHForCausalLM": {"mamba": _MAMBA2, "routed": _ROUTED},
}
EXPERTS: Final = (
    "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "GraniteMoeHybridForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "NemotronHForCausalLM",
)  # fmt: skip
RECURRENT: Final = tuple(_OF_HYBRIDS)


def config_of(architecture: str, **changes: Any) -> ModelConfig:
    """Ranks can be two or four."""
    if architecture in _OF_HYBRIDS:
        like = "Qwen3NextForCausalLM" if architecture == "Qwen3_5MoeForCausalLM" else architecture
        return replace(hybrid(like, **{**_OF_HYBRIDS[architecture], **changes}), architecture=architecture)
    own = GLM4_MOE if architecture == "Glm4MoeForCausalLM" else {"architecture": architecture, **_EXPERTS}
    return gpu_chain.small_config(**{**own, **changes})


def stored(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of a name: eighths up to one, so that products of them are the same in whatever order they are added
    up."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-8, 9, shape, generator=draw).float() / 8.0


def model_of(config: ModelConfig, shard: Shard, asked: list[str] | None = None) -> ModelWeights:
    """A rank's model. asked: gets the names of the tensors that it asks for."""

    def fill(stack: TensorStack) -> torch.Tensor:
        if asked is not None:
            asked.extend(stack.names)
        whole = torch.cat([stored(name, stack.shape(number)) for number, name in enumerate(stack.names)])
        return stack.part_of(whole)

    return ARCHITECTURES[config.architecture].weights(config, TensorReader(fill, lambda weight: weight, shard))


def layers_of(config: ModelConfig, shares: list[Shard]) -> list[tuple[Layer, ...]]:
    """By layer, what each rank has of it."""
    return list(zip(*(model_of(config, shard).layers for shard in shares), strict=True))


def normed(tokens: int) -> torch.Tensor:
    """What the first product of a recurrent mixer reads of tokens: quarters up to one, [tokens, hidden]."""
    return torch.randint(-4, 5, (tokens, 64), generator=torch.Generator().manual_seed(6)).float() / 4.0


def projected(mixer: Mamba2 | GatedDelta, x: torch.Tensor) -> torch.Tensor:
    """What it gives of them, which is not rounded."""
    y = x @ mixer.proj.weight.T
    return y if mixer.proj.bias is None else y + mixer.proj.bias


def parts_of_states(mixer: Mamba2 | GatedDelta, states: tuple[torch.Tensor, ...], of: int) -> list[list[torch.Tensor]]:
    """By rank, its heads of the states, and its channels of what the convolution sees again."""
    shape, (seen, heads) = mixer.shape, states
    if isinstance(shape, Mamba2Shape):
        pieces = [shape.inner, shape.groups * shape.state, shape.groups * shape.state]
    else:
        pieces = [shape.keys, shape.keys, shape.inner]
    by_piece = [piece.chunk(of, 2) for piece in seen.split(pieces, 2)]
    by_head = heads.chunk(of, 1)
    return [[torch.cat([piece[rank] for piece in by_piece], 2), by_head[rank].clone()] for rank in range(of)]
