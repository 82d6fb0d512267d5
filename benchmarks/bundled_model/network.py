"""The network as it is trained: a Llama decoder in plain torch with dropout, and its checkpoint.

Module names are those of the Hugging Face layout, so that the state dict is the checkpoint. Only training uses this
(of the bundled model, its draft head, and the hybrid, which it teaches): the service and the evaluation run the
checkpoint through `runahead.runtime.models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HEAD_DIM = 64
ROPE_THETA = 10_000.0
NORM_EPS = 1e-5
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides a network's size. Heads have 64 dimensions; the embedding is tied to the output."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 640


class AttentionSizes(Protocol):
    """What an attention needs of a shape."""

    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary positions (the two halves of a head rotate together), or none."""

    def __init__(self, shape: AttentionSizes) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden, shape.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(shape.heads * HEAD_DIM, shape.hidden, bias=False)
        self.groups = shape.heads // shape.kv_heads

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:  # x: [batch, tokens, hidden]
        """angles: cos and sin, [tokens, HEAD_DIM] each; None rotates nothing."""
        batch, tokens, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, tokens, -1, HEAD_DIM).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            if angles is None:
                return y
            cos, sin = angles
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-second, first), dim=-1) * sin

        q, k, v = rotate(heads(self.q_proj(x))), rotate(heads(self.k_proj(x))), heads(self.v_proj(x))
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        joined: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))
        return joined


class FeedForward(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and with dropout on what it adds."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp = FeedForward(shape)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), (cos, sin)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Decoder(nn.Module):
    """What a checkpoint calls `model`: embedding, layers, final norm. Ids to hidden states [batch, tokens, hidden]."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.dropout = dropout

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden


class Network(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocabulary], and 0, since there are no experts that could be
    chosen unevenly. The embedding is also the output matrix."""

    by_muon: ClassVar[tuple[str, ...]] = ("proj.weight",)  # how the names end of matrices that Muon trains
    cos: Tensor  # [CONTEXT, HEAD_DIM]
    sin: Tensor  # [CONTEXT, HEAD_DIM]

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, dropout)
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
        angles = torch.outer(torch.arange(CONTEXT, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset(shape)

    def compile_layers(self) -> None:
        """Compile one layer and use it for all: much sooner ready than the whole network, and about as fast."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def reset(self, shape: Shape) -> None:
        """Normal weights of deviation 0.02, smaller where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model(ids, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return F.linear(hidden, self.model.embed_tokens.weight), hidden.new_zeros(())

    @classmethod
    def load(cls, folder: Path) -> Network:
        """The network of a checkpoint that `save` has written, without dropout. Raises KeyError for another one."""
        config = json.loads((folder / "config.json").read_text())
        shape = Shape(
            config["vocab_size"], config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"],
            config["num_key_value_heads"], config["intermediate_size"],
        )  # fmt: skip
        network = cls(shape, 0.0)
        network.load_state_dict(load_file(folder / "model.safetensors"))
        return network.eval()

    def save(self, folder: Path, end_of_text: int) -> None:
        """Write the checkpoint of a Llama."""
        write_checkpoint(folder, self.state_dict(), _config(self.shape, end_of_text), end_of_text)


def _config(shape: Shape, end_of_text: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
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
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "torch_dtype": "bfloat16",
    }


def write_checkpoint(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], end_of_text: int) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16) in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"eos_token_id": end_of_text}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
