"""MiMo checkpoints with their head for tests: random ones, one whose head is always right, and what it proposes.

The definition is that of the model code which Xiaomi has published with the checkpoints: of the embedding e of token t
and the state h before it, which is the model's last one after its final norm or what the head has left there,
x = input_proj([hidden_layernorm(h), token_layernorm(e)]), a Qwen2 layer, final_layernorm, and the model's own matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.models.checkpoints import CASES, Case, save
from tests.runtime.models.eagle_heads import CONFIG, HIDDEN, WIDTH
from tests.runtime.models.head_arithmetic import Floats, attended, gated, normed
from tests.runtime.models.mimo import MiMoConfig

BEGIN = "model.mtp_layers.0."
MIMO = Case("mimo_with_head", MiMoConfig, {"rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1})
assert any(case.config is MiMoConfig for case in CASES)


def random_head(seed: int = 0, *, config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Tensors by the names that they have in a checkpoint. config: of the model, as config.json has it."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    of_queries, of_keys = heads * dim, config["num_key_value_heads"] * dim
    shapes = {
        "input_proj.weight": (hidden, 2 * hidden),
        "self_attn.q_proj.weight": (of_queries, hidden),
        "self_attn.k_proj.weight": (of_keys, hidden),
        "self_attn.v_proj.weight": (of_keys, hidden),
        "self_attn.q_proj.bias": (of_queries,),
        "self_attn.k_proj.bias": (of_keys,),
        "self_attn.v_proj.bias": (of_keys,),
        "self_attn.o_proj.weight": (hidden, of_queries),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    tensors = {BEGIN + name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("token", "hidden", "input", "post_attention", "final"):
        weight = 1.0 + 0.2 * torch.randn(hidden, generator=generator)
        tensors[f"{BEGIN}{name}_layernorm.weight"] = weight
    return tensors


def add_head(folder: Path, head: dict[str, torch.Tensor]) -> None:
    """Into the one file of a checkpoint's tensors."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **head}, path, {"format": "pt"})


def save_with_head(folder: Path, head: dict[str, torch.Tensor] | None = None) -> None:
    """A random checkpoint with a head; None: a random one."""
    save(MIMO, folder)
    add_head(folder, random_head() if head is None else head)


def save_foreseen_mimo(folder: Path, _: Path) -> None:
    """As `save_foreseen` of EAGLE-1: each token follows from the one before alone, and the head knows it."""
    save(MIMO, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name == "model.norm.weight":
            tensor.fill_(1.0)
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    own = random_head(1)
    own[f"{BEGIN}input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        own[BEGIN + name].zero_()
    for name in ("token", "final"):
        own[f"{BEGIN}{name}_layernorm.weight"].fill_(1.0)
    save_file({**tensors, **own}, path, {"format": "pt"})


def as_mimo(source: Path, target: Path, head: dict[str, torch.Tensor]) -> None:
    """A Llama's checkpoint as one of a MiMo, whose biases are zero, with a head. Every token is that of the Llama."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.name != "model.safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]), dtype=tensors[name].dtype)
    save_file({**tensors, **head}, target / "model.safetensors", {"format": "pt"})


class HeadByDefinition:
    """tensors: of the whole checkpoint. All is float64."""

    def __init__(self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        own = {name.removeprefix(BEGIN): tensor for name, tensor in tensors.items() if name.startswith(BEGIN)}
        assert own["mlp.down_proj.weight"].shape == (HIDDEN, WIDTH)
        self._own = {name: tensor.double().numpy() for name, tensor in own.items()}
        self._embedding, self._lm_head = embedding.detach().double().numpy(), lm_head.detach().double().numpy()

    def proposes(self, tokens: list[int], states: list[Floats], count: int) -> list[int]:
        """As `HeadByDefinition.proposes` of EAGLE-1."""
        known, of_tokens = list(tokens), list(states[-1][: len(tokens) - 1])
        found: list[int] = []
        for _ in range(count):
            left = self._last(known, np.stack(of_tokens))
            found.append(int(np.argmax(self._lm_head @ left)))
            known.append(found[-1])
            of_tokens.append(left)
        return found

    def _last(self, tokens: list[int], states: Floats) -> Floats:
        """What the head leaves of the last of these tokens. states: [tokens - 1, hidden]."""
        own = self._own
        of_token = self._normed(self._embedding[tokens[1:]], "token")
        x = np.concatenate([self._normed(states, "hidden"), of_token], axis=1) @ own["input_proj.weight"].T
        heads = CONFIG["num_attention_heads"]
        x = x + attended(self._normed(x, "input"), own, "self_attn.", heads, CONFIG["rope_theta"])
        last: Floats = x[-1]
        return self._normed(last + gated(self._normed(last, "post_attention"), own, "mlp."), "final")

    def _normed(self, x: Floats, name: str) -> Floats:
        return normed(x, self._own[f"{name}_layernorm.weight"], CONFIG["rms_norm_eps"])
