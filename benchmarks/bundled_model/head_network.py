"""The draft head as it is trained: one Llama layer behind a product, unrolled over its own guesses, and its checkpoint.

Source: Li, Wei, Zhang, Zhang, 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". That a head
is trained on what it has itself expected is from Zhang, Wang, Huang, Xu, 2024, "Learning Harmonized Representations for
Speculative Sampling".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.bundled_model.network import (
    CONTEXT,
    HEAD_DIM,
    NORM_EPS,
    ROPE_THETA,
    Attention,
    FeedForward,
    Network,
    Shape,
)


class HeadLayer(nn.Module):
    """The layer, without a norm in front of its attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp = FeedForward(shape)


class HeadNetwork(nn.Module):
    """What a checkpoint of EAGLE-1 holds. Positions of its rotation are those of the tokens."""

    cos: Tensor  # [CONTEXT, HEAD_DIM]
    sin: Tensor  # [CONTEXT, HEAD_DIM]

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape)])
        tables = Network(Shape(vocabulary=1, hidden=HEAD_DIM, layers=0), 0.0)
        self.register_buffer("cos", tables.cos, persistent=False)
        self.register_buffer("sin", tables.sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.01 if residual else 0.02)

    def unrolled(self, embedded: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """What the head expects of the hidden states of positions 1 to T - 1, `steps` times, each [rows, T - 1, width].

        embedded: the tokens' embeddings, hidden: the model's hidden states, both [rows, T, width]. The first time each
        position is told the model's hidden state of the position before it; the next time what the head has expected
        of that one, and so on, as at the places of a run of drafts. So in the first n - 1 positions of the n-th nothing
        is to be looked for.
        """
        layer = cast(HeadLayer, self.layers[0])
        attention, length = layer.self_attn, embedded.shape[1] - 1
        cos, sin = self.cos[1 : 1 + length], self.sin[1 : 1 + length]
        places = torch.arange(length, device=embedded.device)
        age = places[:, None] - places[None, :]  # [T - 1, T - 1], how far back an entry lies
        before, expected = hidden[:, :-1], []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            x = self.fc(torch.cat((embedded[:, 1:], before), dim=-1)).float()  # what is added up is not rounded
            q = _rotated(_heads(attention.q_proj(x)), cos, sin)
            keys.append(_rotated(_heads(attention.k_proj(x)), cos, sin).repeat_interleave(attention.groups, dim=1))
            values.append(_heads(attention.v_proj(x)).repeat_interleave(attention.groups, dim=1))
            # Entries further back than the run are those of the first time; of each later time one is in the run.
            seen = torch.cat([age >= step, *(age == step - later for later in range(1, step + 1))], dim=1)
            attended = F.scaled_dot_product_attention(
                q, torch.cat(keys, dim=2), torch.cat(values, dim=2), seen if step else None, is_causal=not step
            )  # fmt: skip
            x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            expected.append(x)
            before = F.pad(x.to(hidden.dtype), (0, 0, 1, 0))[:, :-1]
        return expected


def _heads(y: Tensor) -> Tensor:
    return y.view(*y.shape[:2], -1, HEAD_DIM).transpose(1, 2)


def _rotated(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = y.chunk(2, dim=-1)
    return y * cos.to(y.dtype) + torch.cat((-second, first), dim=-1) * sin.to(y.dtype)


def save_head(head: HeadNetwork, guessed: Tensor, folder: Path) -> None:
    """Write config.json and model.safetensors (bfloat16) as heads of EAGLE-1 are published, and with them which tokens
    it may guess, as heads of EAGLE-3 have it: what is added to 0, 1, 2, ... guessed: int64 [n], in ascending order."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = head.shape
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    weights["d2t"] = guessed.cpu() - torch.arange(len(guessed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
