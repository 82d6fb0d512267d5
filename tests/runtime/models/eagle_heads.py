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
from safetensors.torch import load_file, save_file

from tests.runtime.models.checkpoints import BASE, CASES, save
from tests.runtime.models.head_arithmetic import Floats, attended, gated, normed

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

    def proposes(self, tokens: list[int], states: list[Floats], count: int) -> list[int]:
        """What it proposes behind these tokens, greedily. states: of the target, [at least tokens - 1, hidden] each: of
        the embedding and of every layer but the last, and the last one's after the final norm."""
        known, of_tokens = list(tokens), list(states[-1][: len(tokens) - 1])
        found: list[int] = []
        for _ in range(count):
            expected = self._last(known, np.stack(of_tokens))
            found.append(int(np.argmax(self._lm_head @ expected)))
            known.append(found[-1])
            of_tokens.append(expected)
        return found

    def _last(self, tokens: list[int], states: Floats) -> Floats:
        """The hidden state that the head expects of the last of these tokens. states: [tokens - 1, hidden]."""
        own = self._own
        x = np.concatenate([self._embedding[tokens[1:]], states], axis=1) @ own["fc.weight"].T + own.get("fc.bias", 0.0)
        x = x + attended(x, own, "layers.0.self_attn.", CONFIG["num_attention_heads"], CONFIG["rope_theta"])
        last: Floats = x[-1]
        norm = own["layers.0.post_attention_layernorm.weight"]
        return last + gated(normed(last, norm, CONFIG["rms_norm_eps"]), own, "layers.0.mlp.")
