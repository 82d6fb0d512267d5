"""Draft heads of EAGLE-1 for tests: random ones, one that is always right, and what a head proposes by its definition.

The definition is that of Li, Wei, Zhang, Zhang, 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature
Uncertainty": x = fc([embedding of token t, hidden state of t - 1]), a Llama layer without a norm in front of its
attention, and the target's head on what it leaves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.runtime.models.checkpoints import BASE, CASES, save

Floats = NDArray[np.float64]
VOCAB, HIDDEN, WIDTH = BASE["vocab_size"], BASE["hidden_size"], BASE["intermediate_size"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


def random_head(seed: int = 0, *, bias: bool = False, config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Tensors by the names that published heads have."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (config["num_key_value_heads"] * head_dim, hidden),
        "layers.0.self_attn.v_proj.weight": (config["num_key_value_heads"] * head_dim, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (width, hidden),
        "layers.0.mlp.up_proj.weight": (width, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, width),
    }
    if bias:
        shapes["fc.bias"] = (hidden,)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_head(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Returns the folder. changes: of config.json; a key that is None is left out."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_foreseen(target: Path, head: Path) -> None:
    """A target each of whose tokens follows from the one before alone, and a head that knows it: it is always right."""
    save(CASES[0], target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name in ("model.norm.weight",):
            tensor.fill_(1.0)
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()  # the final norm leaves it as it is
    save_file(tensors, path, {"format": "pt"})
    own = random_head(1)
    own["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        own[name].zero_()
    write_head(head, own)


class HeadByDefinition:
    """tensors: of a head. embedding, lm_head: of its target, [vocab, hidden]. All is float64."""

    def __init__(self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self._own = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self._embedding, self._lm_head = embedding.detach().double().numpy(), lm_head.detach().double().numpy()

    def proposes(self, tokens: list[int], hidden: Floats, count: int) -> list[int]:
        """What it proposes behind these tokens, greedily. hidden: [at least tokens - 1, hidden], of the target."""
        known, states = list(tokens), [np.array(state, np.float64) for state in hidden[: len(tokens) - 1]]
        found: list[int] = []
        for _ in range(count):
            expected = self._last(known, np.stack(states))
            found.append(int(np.argmax(self._lm_head @ expected)))
            known.append(found[-1])
            states.append(expected)
        return found

    def _last(self, tokens: list[int], states: Floats) -> Floats:
        """The hidden state that the head expects of the last of these tokens. states: [tokens - 1, hidden]."""
        own = self._own
        x = np.concatenate([self._embedding[tokens[1:]], states], axis=1) @ own["fc.weight"].T + own.get("fc.bias", 0.0)
        x = x + self._attention(x) @ own["layers.0.self_attn.o_proj.weight"].T
        last = x[-1]
        scale = np.sqrt(np.mean(last**2) + CONFIG["rms_norm_eps"])
        normed = last / scale * own["layers.0.post_attention_layernorm.weight"]
        gate, up = (own[f"layers.0.mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        gated: Floats = last + own["layers.0.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return gated

    def _attention(self, x: Floats) -> Floats:
        """Causal, of all entries, [n, hidden]. The first entry stands at position 0."""
        count, heads, kv_heads = len(x), CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        q, k, v = (x @ self._own[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
        dim = q.shape[1] // heads
        q, k, v = (part.reshape(count, -1, dim) for part in (q, k, v))
        q, k = _rotated(q), _rotated(k)
        attended = np.empty((count, heads, dim))
        hidden_from = np.triu(np.ones((count, count), np.bool_), 1)
        for head in range(heads):
            of_head = head // (heads // kv_heads)
            scores = np.where(hidden_from, -np.inf, q[:, head] @ k[:, of_head].T / np.sqrt(dim))
            weights = np.exp(scores - scores.max(1, keepdims=True))
            attended[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, of_head]
        return attended.reshape(count, -1)


def _rotated(x: Floats) -> Floats:
    """x: [n, heads, dim], at positions 0 to n - 1."""
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None] * CONFIG["rope_theta"] ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
