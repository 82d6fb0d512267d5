"""What a model is made of, as kernels see it: layers, each a mixer and a feed-forward, with their weights.

A *mixer* lets a token see those before it, a *feed-forward* works on each token alone. Each kind is a dataclass that
holds its weights and what is fixed about it; a kernel set has one function for each kind (`BoundKernels`). Tensors are
on the kernel set's device and of the model's dtype unless said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

import torch

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
# gelu(x) is x times the logistic function of GELU_SLOPE * (x + GELU_CUBE * x^3).
GELU_SLOPE: Final = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBE: Final = 0.044715


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: x / sqrt(mean(x^2) + eps) * weight over the last dimension, the mean in float32."""

    weight: torch.Tensor  # [n], of the model's dtype, or float32 where it is made of what the checkpoint has
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """A product, x @ weight.T + bias."""

    weight: torch.Tensor  # [out, in], packed by the kernel set
    bias: torch.Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a mixer keeps of a row from one launch to the next. Every kind of mixer says so, as `keeps`.

    kv: (kv_heads, head_dim) of a key and a value of each token, which lie in the row's blocks; None where there are
    none. state_bytes: what stays as large however long the row is, and lies in the row's slot.
    """

    kv: tuple[int, int] | None = None
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Query head h reads KV head h // (heads // kv_heads). scale: multiplies the scores."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Attention:
    """A mixer: x += post_norm(o(attention(qkv(norm(x))))), causal, over keys and values that it keeps of every token.

    norm, post_norm: None leaves that one out, but not both of them.
    window: a token attends to itself and the window - 1 tokens before it; 0: to all before it. q_norm, k_norm: of every
    head before its rotation, both or neither; norms_span_heads: of all heads of a token together. Queries, keys and
    values are one product. rope: which of the model's tables of angles, by number in `Ends.ropes`.
    """

    shape: AttentionShape
    window: int
    norm: Norm | None  # over hidden
    qkv: Linear  # hidden to (heads + 2 * kv_heads) * head_dim
    q_norm: Norm | None  # over head_dim, or over heads * head_dim
    k_norm: Norm | None  # over head_dim, or over kv_heads * head_dim
    o: Linear  # heads * head_dim to hidden
    rope: int = 0
    post_norm: Norm | None = None  # over hidden
    norms_span_heads: bool = False

    @property
    def keeps(self) -> Kept:
        return Kept(kv=(self.shape.kv_heads, self.shape.head_dim))


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward: x += post_norm(down(activation(gate) * up)), gate and up of norm(x), which are one product. norm,
    post_norm: None leaves that one out, but not both of them. activation: gelu_tanh is GELU by its formula with tanh.
    """

    norm: Norm | None  # over hidden
    gate_up: Linear  # hidden to 2 * intermediate
    down: Linear  # intermediate to hidden
    post_norm: Norm | None = None  # over hidden
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward in which each token is sent to a few of many experts: x += the sum, over the experts that the
    token's router chooses, of share * down(silu(gate) * up), gate and up of norm(x), which are one product.

    The router's scores are a product of norm(x). Shares are their softmax over all experts, in float32; those of the
    `chosen` highest scores count, of equal scores the experts of the lowest numbers, and they are divided by their own
    sum if `renormalised`. A token's sum is taken in the order of the experts' numbers, whatever its neighbours choose.
    Tokens of masked rows, and padding, choose none, and nothing is added to them.
    """

    norm: Norm  # over hidden
    router: Linear  # hidden to experts
    gate_up: tuple[Linear, ...]  # of each expert, hidden to 2 * intermediate
    down: tuple[Linear, ...]  # of each expert, intermediate to hidden
    chosen: int  # experts of a token
    renormalised: bool

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.gate_up)

    @property
    def width(self) -> int:
        """intermediate, of an expert."""
        return self.down[0].weight.shape[1]


# Another kind joins its alias; `BoundKernels` says what else it takes.
Mixer: TypeAlias = Attention
FeedForward: TypeAlias = Dense | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    mixer: Mixer
    feed_forward: FeedForward


def products_of(layer: Layer) -> list[Linear]:
    """Every product of a layer, in the order of its fields; those of experts one by one."""
    found: list[Linear] = []
    for kind in (layer.mixer, layer.feed_forward):
        for field in fields(kind):
            part = getattr(kind, field.name)
            found += [item for item in (part if isinstance(part, tuple) else (part,)) if isinstance(item, Linear)]
    return found


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary angles by position. Element i of a head is rotated with element i + head_dim // 2; where sin is 0 and cos
    is 1, the two stay as they are."""

    cos: torch.Tensor  # float32 [positions, head_dim // 2]
    sin: torch.Tensor  # float32 [positions, head_dim // 2]


@dataclass(frozen=True, slots=True)
class Ends:
    """What a model has beside its layers: where a token comes in and where it leaves.

    ropes: an attention says which of them is its own. embedding_scale: what a token's row of the embedding is
    multiplied by.
    """

    embedding: torch.Tensor  # [vocab, hidden]
    final_norm: Norm  # over hidden
    ropes: tuple[RopeTable, ...]
    embedding_scale: float = 1.0
