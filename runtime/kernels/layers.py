"""A model's layers for kernels: mixers and feed-forwards with their weights.

A *mixer* lets a token see earlier tokens, a *feed-forward* processes each token alone. Each kind is a dataclass with
weights and constants; a kernel set has one function for each kind (`BoundKernels`). Tensors are on the kernel set's
device and of the model's dtype unless stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.quantized_weight import ExpertFp8, Fp8Weight, QuantizedWeight
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
ExpertActivation: TypeAlias = Literal["silu", "squared_relu"]
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
    """A product, x @ weight.T + bias. quantized: the actual weight; `weight` then has only shape and dtype (torch's
    device `meta`).
    """

    weight: torch.Tensor  # [out, in], packed by the kernel set
    bias: torch.Tensor | None  # [out]
    quantized: QuantizedWeight | Fp8Weight | ExpertFp8 | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A mixer's data of a row between launches, declared by every kind as `keeps`.

    kv: (kv_heads, head_dim) of each token's key and value, in the row's blocks; None: none. state: shapes of fixed-size
        data, float32, in the row's state slot.
    inputs: float32 numbers from which a token's step of the state is computed. The slot keeps the drafts' numbers until
        the accepted drafts are known.
    """

    kv: tuple[int, int] | None = None
    state: tuple[tuple[int, ...], ...] = ()
    inputs: int = 0

    @property
    def state_bytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.state)

    def run_bytes(self, drafts: int) -> int:
        """Return the bytes of the inputs of this many drafts."""
        return 4 * drafts * self.inputs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """An attention's heads. Query head h reads KV head h // (heads // kv_heads). scale: multiplies the scores."""

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

    norm, post_norm: None leaves it out; outside draft heads Triton's kernels need at least one.
    window: a token attends to itself and the window - 1 tokens before it; 0: to all before it. first: nothing before
    this position is attended to; a token before it attends to nothing. Where it is not 0, Triton's kernels take rows of
    one query token, none of which stands before it. q_norm, k_norm: of every head before its rotation, both or neither;
    norms_span_heads: of all heads of a token together. Queries, keys and values are one product. rope: which of the
    model's tables of angles, by number in `EmbeddingAndHead.ropes`. score_cap: scores become score_cap *
    tanh(score / score_cap); 0: no bound. gate: attention's result times the logistic function of this product of the
    queries' input, before `o`. joined: queries, keys and values are products of what `Fuse` has joined.
    kv_scales: keys and values are kept as FP8, e4m3 number times scale; None: they are kept in the served dtype.
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
    first: int = 0
    gate: Linear | None = None  # hidden to heads * head_dim
    score_cap: float = 0.0
    joined: bool = False
    kv_scales: torch.Tensor | None = None  # float32 [2, kv_heads], of keys and of values

    @property
    def keeps(self) -> Kept:
        return Kept(kv=(self.shape.kv_heads, self.shape.head_dim))


@dataclass(frozen=True, slots=True)
class Fuse:
    """The input of a draft head, from a token's embedding e and the previous position's hidden state h: joined =
    [token_norm(e), hidden_norm(h)], or reversed if `hidden_first`. x = product(joined); without a product x = h, or
    hidden_norm(h) if `normed_residual`. A norm that is None is left out.
    """

    product: Linear | None  # the two joined to hidden
    token_norm: Norm | None = None
    hidden_norm: Norm | None = None
    hidden_first: bool = False
    normed_residual: bool = False


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Mamba-2's sizes. heads: each of head_dim numbers, with B and C of group h // (heads // groups). state: numbers
    for each of a head's. window: tokens in the convolution, including the current one.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    window: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The convolved numbers: x, B and C."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A recurrent mixer. Of each token, z, x, B, C and dt are one product of norm(x), in this order. x, B and C are
    convolved over the last `window` tokens, each channel for itself, and go through SiLU. Then, for each head with its
    share of x, its group's B and C, and a state S [head_dim, state] that begins as zeros:

        dt = clamp(softplus(dt + dt_bias), *dt_limits)
        S = exp(dt * a) * S + dt * x B^T
        y = S C + d * x

    and x += out(gated_norm(y * silu(z))), where the norm is taken over each group's share of y. All of it is float32.

    Source: Dao and Gu, 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured
    State Space Duality", section 7.
    """

    shape: Mamba2Shape
    norm: Norm  # over hidden
    proj: Linear  # hidden to inner + channels + heads
    conv_weight: torch.Tensor  # [channels, 1, window], the newest token's last
    conv_bias: torch.Tensor | None  # [channels]
    a: torch.Tensor  # float32 [heads], below 0
    d: torch.Tensor  # [heads]
    dt_bias: torch.Tensor  # [heads]
    dt_limits: tuple[float, float]
    gated_norm: Norm  # weight over inner, mean over inner / groups
    out: Linear  # inner to hidden

    @property
    def keeps(self) -> Kept:
        """Return the convolution's earlier inputs, oldest first, and the heads' states."""
        shape = self.shape
        return Kept(
            state=((shape.window - 1, shape.channels), (shape.heads, shape.head_dim, shape.state)),
            inputs=shape.channels + shape.heads,
        )


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A gated delta net's sizes: query and key heads of key_dim numbers, value heads of value_dim; value head h uses
    key head h // (value_heads // key_heads). window: tokens in the convolution, including the current one.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    window: int

    @property
    def keys(self) -> int:
        """The numbers of all keys."""
        return self.key_heads * self.key_dim

    @property
    def inner(self) -> int:
        """The numbers of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The convolved numbers: queries, keys and values."""
        return 2 * self.keys + self.inner


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A recurrent mixer, a gated delta net. Of each token, z, queries, keys, values, b and dt are one product of
    norm(x), in this order. Queries, keys and values are convolved over the last `window` tokens, each channel for
    itself, and go through SiLU; a query and a key are divided by their lengths, sqrt(sum(k^2) + 1e-6), and the query by
    sqrt(key_dim). Then, for each head of values with its key head's q and k, and a state S [value_dim, key_dim] that
    begins as zeros:

        S = exp(softplus(dt + dt_bias) * a) * S
        S = S + logistic(b) * (v - S k) k^T
        y = S q

    and x += out(gated_norm(y) * silu(z)), where the norm is taken over each head of y. All of it is float32.

    Source: Yang, Kautz and Hatamizadeh, 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", section 3.1.
    """

    shape: DeltaShape
    norm: Norm  # over hidden
    proj: Linear  # hidden to inner + channels + 2 * value_heads
    conv_weight: torch.Tensor  # [channels, 1, window], the newest token's last
    a: torch.Tensor  # float32 [value_heads], below 0
    dt_bias: torch.Tensor  # [value_heads]
    gated_norm: Norm  # over value_dim
    out: Linear  # inner to hidden

    @property
    def keeps(self) -> Kept:
        """Return the convolution's earlier inputs, oldest first, and the heads' states."""
        shape = self.shape
        return Kept(
            state=((shape.window - 1, shape.channels), (shape.value_heads, shape.value_dim, shape.key_dim)),
            inputs=shape.channels + 2 * shape.value_heads,
        )


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
class Ungated:
    """A feed-forward without a gate: x += down(relu(up(norm(x)))^2).

    Source: So et al., 2021, "Primer: Searching for Efficient Transformers for Language Modeling", section 4, for the
    square.
    """

    norm: Norm  # over hidden
    up: Linear  # hidden to intermediate
    down: Linear  # intermediate to hidden


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert for every token: its output is multiplied by the logistic function of the dot product of its input with
    `gate`, if there is one.
    """

    gate_up: Linear  # like the other experts': hidden to 2 * intermediate or to intermediate
    down: Linear  # intermediate to hidden
    gate: torch.Tensor | None = None  # [hidden]

    @property
    def width(self) -> int:
        """intermediate"""
        return self.down.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward in which each token is sent to a few of many experts: x += the sum, over the experts that the
    token's router chooses, of routing weight * down(silu(gate) * up), gate and up of norm(x), which are one product.
    activation: with squared_relu experts have no gate, and make down(relu(up)^2).

    The router's scores are a product of norm(x); `choice` defines the chosen experts and the routing weights. A
    token's sum is in the order of expert numbers, whatever its neighbors choose; the shared expert's result for norm(x)
    comes last. Tokens of masked rows, and padding, choose none, and nothing is added to them.
    """

    norm: Norm  # over hidden
    router: Linear  # hidden to experts
    gate_up: tuple[Linear, ...]  # of each expert, hidden to 2 * intermediate, or to intermediate without gates
    down: tuple[Linear, ...]  # of each expert, intermediate to hidden
    choice: Choice
    shared: SharedExpert | None = None
    activation: ExpertActivation = "silu"

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.gate_up)

    @property
    def chosen(self) -> int:
        """The experts of a token."""
        return self.choice.chosen

    @property
    def width(self) -> int:
        """An expert's intermediate size."""
        return self.down[0].weight.shape[1]

    @property
    def idle(self) -> int:
        """The number of experts that a token does not choose."""
        each = sum(math.prod(linear.weight.shape) for linear in (self.gate_up[0], self.down[0]))
        return (self.count - self.chosen) * each


# A further kind joins its alias; `BoundKernels` says what else is needed.
Mixer: TypeAlias = Attention | Mamba2 | GatedDelta
FeedForward: TypeAlias = Dense | Ungated | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: a mixer, a feed-forward or both; None: missing."""

    mixer: Mixer | None
    feed_forward: FeedForward | None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary angles by position. Element i of a head is paired with element i + head_dim // 2; sin 0 and cos 1 leave a
    pair unchanged.
    """

    cos: torch.Tensor  # float32 [positions, head_dim // 2]
    sin: torch.Tensor  # float32 [positions, head_dim // 2]


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """A model's weights outside its layers: embedding, final norm and rope tables. The head is bound elsewhere.

    ropes: tables that attentions reference by number. embedding_scale: multiplies embeddings. ranks: of the model; each
    has an equal part of the vocabulary's embeddings.
    """

    embedding: torch.Tensor  # [vocab / ranks, hidden]
    final_norm: Norm  # over hidden
    ropes: tuple[RopeTable, ...]
    embedding_scale: float = 1.0
    ranks: Ranks = ONE_RANK
