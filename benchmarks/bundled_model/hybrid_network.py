"""The hybrid network as it is trained: Mamba-2 and attention in turns, experts in every layer, in plain torch.

Module names are those that Granite 4 hybrids have in the Hugging Face layout, but for experts, each of which is a
parameter of its own here. Attention rotates nothing: a state says where a token is. Only `train` uses this (and tests,
for small random hybrids): the service and the evaluation run the checkpoint through `runahead.runtime.models`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bundled_model.network import CONTEXT, HEAD_DIM, NORM_EPS, Attention, write_checkpoint

CHUNK: Final = 64  # tokens whose part of the recurrence is one product
WINDOW: Final = 4  # tokens that the convolution sees
MAMBA, ATTENTION = "mamba", "attention"
STEPS: Final = 1e-3, 0.1  # between which a head's step lies at first


@dataclass(frozen=True, slots=True)
class HybridShape:
    """What decides a hybrid network's size. `kinds`: the mixer of each layer. `mamba_heads` divide `hidden` among
    them. Attention has `heads` of 64 dimensions, together `hidden`; the embedding is tied to the output. Raises
    ValueError for heads that do not fit.

    What a product sums over is a multiple of 64 by default, which the kernels of GPUs for a few rows want.
    """

    vocabulary: int = 4096
    hidden: int = 192
    kinds: tuple[str, ...] = (MAMBA, MAMBA, ATTENTION, MAMBA, MAMBA, ATTENTION)
    heads: int = 3
    kv_heads: int = 1
    mamba_heads: int = 6
    state: int = 32
    experts: int = 4
    chosen: int = 2
    expert_size: int = 64
    shared_size: int = 128

    def __post_init__(self) -> None:
        if self.heads * HEAD_DIM != self.hidden:
            made = self.heads * HEAD_DIM
            raise ValueError(f"{self.heads} heads of {HEAD_DIM} are {made} numbers, and hidden is {self.hidden}")
        if self.hidden % self.mamba_heads:
            raise ValueError(f"{self.mamba_heads} heads of Mamba-2 do not divide {self.hidden} numbers")

    @property
    def channels(self) -> int:
        """What is convolved: x, B and C, of which there is one group."""
        return self.hidden + 2 * self.state

    @property
    def layers(self) -> int:
        return len(self.kinds)


class Mamba2(nn.Module):
    """The recurrence of `runahead.runtime.kernels.layers.Mamba2`, in chunks of CHUNK tokens.

    Within a chunk it is one masked product, and between chunks another. Source: Dao and Gu, 2024, "Transformers are
    SSMs", section 6.
    """

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.in_proj = nn.Linear(shape.hidden, shape.hidden + shape.channels + shape.mamba_heads, bias=False)
        self.conv1d = nn.Conv1d(shape.channels, shape.channels, WINDOW, groups=shape.channels)
        self.A_log = nn.Parameter(torch.linspace(1, 16, shape.mamba_heads).log())
        self.D = nn.Parameter(torch.ones(shape.mamba_heads))
        first = torch.linspace(math.log(STEPS[0]), math.log(STEPS[1]), shape.mamba_heads).exp()
        self.dt_bias = nn.Parameter(first + torch.log(-torch.expm1(-first)))  # softplus makes of it what it was
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.out_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, hidden], tokens a multiple of CHUNK
        shape, tokens = self.shape, x.shape[1]
        z, convolved, dt = self.in_proj(x).split((shape.hidden, shape.channels, shape.mamba_heads), dim=-1)
        padded = F.pad(convolved, (0, 0, WINDOW - 1, 0))
        taps = self.conv1d.weight[:, 0]  # [channels, WINDOW]
        assert self.conv1d.bias is not None
        summed = self.conv1d.bias.expand(padded.shape[0], tokens, -1)
        for tap in range(WINDOW):
            summed = summed + padded[:, tap : tap + tokens] * taps[:, tap]
        values, b, c = F.silu(summed).split((shape.hidden, shape.state, shape.state), dim=-1)
        y = self._scan(values, b, c, F.softplus(dt.float() + self.dt_bias))
        mixed: Tensor = self.out_proj(self.norm(y * F.silu(z)))
        return mixed

    def _scan(self, values: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        """values: [batch, tokens, hidden]. b, c: [batch, tokens, state]. dt: [batch, tokens, heads]."""
        batch, tokens, heads = dt.shape
        x = values.reshape(batch, -1, CHUNK, heads, values.shape[-1] // heads).transpose(2, 3)  # [b, n, h, CHUNK, p]
        b, c = (part.reshape(batch, -1, 1, CHUNK, part.shape[-1]) for part in (b, c))
        dt = dt.reshape(batch, -1, CHUNK, heads).transpose(2, 3)  # [b, n, h, CHUNK]
        passed = (dt * -self.A_log.exp()[:, None]).cumsum(-1)  # logarithm of what is left of a chunk's beginning
        ages = passed[..., :, None] - passed[..., None, :]
        decay = ages.masked_fill(~_lower(CHUNK, ages), -math.inf).exp()
        near = (c @ b.transpose(-1, -2) * decay * dt[..., None, :]) @ x
        left = (passed[..., -1:] - passed).exp() * dt
        made = (x * left[..., None]).transpose(-1, -2) @ b  # [b, n, h, p, state], by each chunk
        ends = passed[..., -1].transpose(1, 2).cumsum(-1)  # [b, h, n]
        between = (ends - passed[..., -1].transpose(1, 2))[..., :, None] - ends[..., None, :]
        kept = between.masked_fill(~_lower(between.shape[-1], between, -1), -math.inf).exp()
        begun = (kept @ made.transpose(1, 2).flatten(3)).unflatten(-1, made.shape[3:]).transpose(1, 2)
        far = passed.exp()[..., None] * (c @ begun.transpose(-1, -2))
        y = near + far + self.D[:, None, None] * x
        return y.transpose(2, 3).reshape(batch, tokens, -1)


def _lower(size: int, like: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=like.device).tril(diagonal)


class Experts(nn.Module):
    """A few of many experts for each token, and one that all get. Every expert computes every token, and those that
    were not chosen count nothing: at this size that is sooner done than sorting tokens."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.ups = nn.ParameterList(torch.empty(2 * shape.expert_size, shape.hidden) for _ in range(shape.experts))
        self.downs = nn.ParameterList(torch.empty(shape.hidden, shape.expert_size) for _ in range(shape.experts))
        self.shared_up = nn.Linear(shape.hidden, 2 * shape.shared_size, bias=False)
        self.shared_down = nn.Linear(shape.shared_size, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [batch, tokens, hidden]
        """The sum of what was chosen, and how unevenly: 1 where all experts have the same share of the tokens.

        Source of the latter: Fedus, Zoph and Shazeer, 2021, "Switch Transformers", section 2.2.
        """
        scores = self.router(x).float()
        best = scores.topk(self.shape.chosen, dim=-1)
        shares = torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(-1))  # [..., experts]
        gate, up = F.linear(x, torch.cat(list(self.ups))).unflatten(-1, (self.shape.experts, 2, -1)).unbind(-2)
        each = F.silu(gate) * up * shares[..., None].to(gate.dtype)
        routed = F.linear(each.flatten(-2), torch.cat(list(self.downs), dim=1))
        first, second = self.shared_up(x).chunk(2, dim=-1)
        used = (shares > 0).float().mean((0, 1)) / self.shape.chosen
        uneven = self.shape.experts * (used * scores.softmax(-1).mean((0, 1))).sum()
        return routed + self.shared_down(F.silu(first) * second), uneven


class HybridLayer(nn.Module):
    """A mixer and experts, each behind a norm and with dropout on what it adds."""

    def __init__(self, shape: HybridShape, kind: str, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mamba = Mamba2(shape) if kind == MAMBA else None
        self.self_attn = Attention(shape) if kind == ATTENTION else None
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.experts = Experts(shape)
        self.dropout = dropout

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.input_layernorm(x)
        if self.mamba is not None:
            mixed = self.mamba(normed)
        else:
            assert self.self_attn is not None
            mixed = self.self_attn(normed, None)
        x = x + F.dropout(mixed, self.dropout, self.training)
        fed, uneven = self.experts(self.post_attention_layernorm(x))
        return x + F.dropout(fed, self.dropout, self.training), uneven


class HybridDecoder(nn.Module):
    """What a checkpoint calls `model`."""

    def __init__(self, shape: HybridShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(HybridLayer(shape, kind, dropout) for kind in shape.kinds)
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        costs = []
        for layer in self.layers:
            x, uneven = layer(x)
            costs.append(uneven)
        return self.norm(x), torch.stack(costs).mean()


class HybridNetwork(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocabulary], and how unevenly experts were chosen."""

    by_muon: ClassVar[tuple[str, ...]] = ("proj.weight", "ups", "downs", "shared_up", "shared_down")

    def __init__(self, shape: HybridShape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.model = HybridDecoder(shape, dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = any(part in name for part in ("o_proj", "out_proj", "downs", "shared_down"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def compile_layers(self) -> None:
        """Compile a layer of each kind and use it for all."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden, uneven = self.model(ids)
        return F.linear(hidden, self.model.embed_tokens.weight), uneven

    def save(self, folder: Path, end_of_text: int) -> None:
        """Write the checkpoint of a Granite 4 hybrid."""
        shape = self.shape
        weights: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            before, found, inside = name.partition(".experts.")
            if not found:
                weights[name] = value
            elif inside.startswith("shared_"):
                weights[f"{before}.shared_mlp.{_OURS[inside.removesuffix('.weight')]}.weight"] = value
            elif inside == "router.weight":
                weights[f"{before}.block_sparse_moe.router.layer.weight"] = value
        for number, layer in enumerate(self.model.layers):
            assert isinstance(layer, HybridLayer)
            block = f"model.layers.{number}.block_sparse_moe."
            weights[f"{block}input_linear.weight"] = torch.stack(list(layer.experts.ups))
            weights[f"{block}output_linear.weight"] = torch.stack(list(layer.experts.downs))
        config: dict[str, Any] = {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.expert_size,
            "shared_intermediate_size": shape.shared_size,
            "num_hidden_layers": shape.layers,
            "layer_types": list(shape.kinds),
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.chosen,
            "mamba_n_heads": shape.mamba_heads,
            "mamba_d_head": shape.hidden // shape.mamba_heads,
            "mamba_n_groups": 1,
            "mamba_d_state": shape.state,
            "mamba_d_conv": WINDOW,
            "mamba_expand": 1,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "hidden_act": "silu",
            "position_embedding_type": "nope",
            "attention_multiplier": HEAD_DIM**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": NORM_EPS,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": end_of_text,
            "torch_dtype": "bfloat16",
        }
        write_checkpoint(folder, weights, config, end_of_text)


_OURS: Final = {"shared_up": "input_linear", "shared_down": "output_linear"}
