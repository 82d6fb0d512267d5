"""Checkpoints of Qwen3-Next and Qwen3.5 with their head for tests: random ones, one whose head is right each time or
mostly, and what a head proposes.

The definition is the one that is published with vLLM and SGLang, which run the checkpoints: of the embedding e of token
t and the state h before it, which is the model's last one after its final norm or what the head has left there,
x = fc([pre_fc_norm_embedding(e), pre_fc_norm_hidden(h)]), a layer of the model with full attention, norm, and the
model's own matrix. Each norm is by one more than its weight.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3NextConfig

from tests.runtime.models.checkpoints import CASES, FULL, RECURRENT, Case, save
from tests.runtime.models.head_arithmetic import Floats, normed, rotated, weighed
from tests.runtime.models.mimo_heads import add_head

BEGIN, LAYER = "mtp.", "mtp.layers.0."
NAMES = ("qwen3_next", "qwen3_next_odd_heads", "qwen3_5", "qwen3_5_moe")
HEADED = {case.name: replace(case, shard_size="1GB") for case in CASES if case.name in NAMES}
# One of each kind of layer, of sizes that divide into tiles.
IN_TILES = Case(
    "qwen3_next_in_tiles",
    Qwen3NextConfig,
    {
        **HEADED["qwen3_next"].changes,
        "num_hidden_layers": 2,
        "layer_types": [RECURRENT, FULL],
        "linear_num_key_heads": 3,
        "linear_key_head_dim": 16,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
)
# What a layer, of the model or of the head, adds to the stream.
_ADDS = ("self_attn.o_proj.weight", "self_attn.o_proj.bias", "linear_attn.out_proj.weight", "down_proj.weight")


def random_head(config: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors by the names that they have in a checkpoint. config: of `transformers`."""
    hidden, dim = config.hidden_size, config.head_dim
    of_queries, of_keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {f"{BEGIN}fc.weight": (hidden, 2 * hidden)}
    rows = {"q": 2 * of_queries, "k": of_keys, "v": of_keys}
    shapes |= {f"{LAYER}self_attn.{name}_proj.weight": (count, hidden) for name, count in rows.items()}
    shapes[f"{LAYER}self_attn.o_proj.weight"] = (hidden, of_queries)
    if config.attention_bias:
        shapes |= {f"{LAYER}self_attn.{name}_proj.bias": (count,) for name, count in {**rows, "o": hidden}.items()}
    feed_forwards = {"": getattr(config, "intermediate_size", 0)}
    if getattr(config, "num_experts", 0):
        shapes |= {f"{LAYER}mlp.gate.weight": (config.num_experts, hidden)}
        shapes |= {f"{LAYER}mlp.shared_expert_gate.weight": (1, hidden)}
        feed_forwards = {f"experts.{number}.": config.moe_intermediate_size for number in range(config.num_experts)}
        feed_forwards["shared_expert."] = config.shared_expert_intermediate_size
    for name, width in feed_forwards.items():
        shapes |= {f"{LAYER}mlp.{name}{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
        shapes[f"{LAYER}mlp.{name}down_proj.weight"] = (hidden, width)
    shapes |= {f"{BEGIN}{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= {f"{LAYER}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {f"{LAYER}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save_with_qwen_head(folder: Path, case: Case = HEADED["qwen3_next"]) -> dict[str, torch.Tensor]:
    """A random checkpoint with a random head, which is returned."""
    save(case, folder)
    head = random_head(AutoConfig.from_pretrained(folder))
    add_head(folder, head)
    return head


def save_foreseen_qwen(
    folder: Path, _: Path | None = None, *, case: Case = HEADED["qwen3_next"], noise: float = 0.0
) -> dict[str, torch.Tensor]:
    """As `save_foreseen` of EAGLE-1: each token follows from the one before alone, and the head knows it. noise: the
    layers of both add so much of what they would add, so that the head is wrong at times. Returns the head."""
    save(case, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    own = random_head(AutoConfig.from_pretrained(folder), 1)
    for name, tensor in {**tensors, **own}.items():
        if name.endswith(_ADDS):
            tensor.mul_(noise)
        if name == "model.norm.weight" or name.removeprefix(BEGIN) in ("pre_fc_norm_embedding.weight", "norm.weight"):
            tensor.zero_()
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    hidden = embedding.shape[1]
    own[f"{BEGIN}fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    save_file({**tensors, **own}, path, {"format": "pt"})
    return own


class HeadByDefinition:
    """tensors: of the whole checkpoint. config: of `transformers`. All is float64."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, lm_head: torch.Tensor, config: Any
    ) -> None:
        self._own = {name: tensor.double().numpy() for name, tensor in tensors.items() if name.startswith(BEGIN)}
        self._embedding, self._lm_head = embedding.detach().double().numpy(), lm_head.detach().double().numpy()
        self._config = config

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
        of_token = self._normed(self._embedding[tokens[1:]], f"{BEGIN}pre_fc_norm_embedding")
        of_state = self._normed(states, f"{BEGIN}pre_fc_norm_hidden")
        x = np.concatenate([of_token, of_state], axis=1) @ self._own[f"{BEGIN}fc.weight"].T
        x = x + self._attended(self._normed(x, f"{LAYER}input_layernorm"))
        last: Floats = x[-1]
        y = self._normed(last, f"{LAYER}post_attention_layernorm")
        return self._normed(last + (self._chosen(y) if self._has_experts else self._gated(y, "")), f"{BEGIN}norm")

    @property
    def _has_experts(self) -> bool:
        return f"{LAYER}mlp.gate.weight" in self._own

    def _attended(self, x: Floats) -> Floats:
        """Of all entries, with the gate and the output product. Of a head's numbers the first are rotated."""
        config, dim = self._config, self._config.head_dim
        q, k, v = (self._product(x, f"self_attn.{name}_proj") for name in "qkv")
        q, k, v = q.reshape(len(x), -1, 2 * dim), k.reshape(len(x), -1, dim), v.reshape(len(x), -1, dim)
        q, gate = q[..., :dim], q[..., dim:]
        count, theta = int(dim * _share(config)), config.rope_parameters["rope_theta"]

        def turned(part: Floats, name: str) -> Floats:
            part = self._normed(part, f"{LAYER}self_attn.{name}_norm")
            return np.concatenate([rotated(part[..., :count], theta), part[..., count:]], axis=-1)

        found = weighed(turned(q, "q"), turned(k, "k"), v) / (1 + np.exp(-gate))
        return self._product(found.reshape(len(x), -1), "self_attn.o_proj")

    def _chosen(self, x: Floats) -> Floats:
        """Of the experts of one token, x [hidden], and of the one that each token gets."""
        scores = self._own[f"{LAYER}mlp.gate.weight"] @ x
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        best = np.argsort(-shares, kind="stable")[: self._config.num_experts_per_tok]
        whole = shares[best].sum() if getattr(self._config, "norm_topk_prob", True) else 1.0
        found = sum(shares[number] / whole * self._gated(x, f"experts.{number}.") for number in best.tolist())
        own: NDArray[np.float64] = 1 / (1 + np.exp(-self._own[f"{LAYER}mlp.shared_expert_gate.weight"] @ x))
        return np.asarray(found + own * self._gated(x, "shared_expert."))

    def _gated(self, x: Floats, name: str) -> Floats:
        gate, up = (self._product(x, f"mlp.{name}{part}_proj") for part in ("gate", "up"))
        return self._product(gate / (1 + np.exp(-gate)) * up, f"mlp.{name}down_proj")

    def _product(self, x: Floats, name: str) -> Floats:
        found: Floats = x @ self._own[f"{LAYER}{name}.weight"].T + self._own.get(f"{LAYER}{name}.bias", 0.0)
        return found

    def _normed(self, x: Floats, name: str) -> Floats:
        return normed(x, 1.0 + self._own[f"{name}.weight"], self._config.rms_norm_eps)


def _share(config: Any) -> float:
    """Of a head, that is rotated."""
    found: float = config.rope_parameters.get("partial_rotary_factor", 0.25)
    return found
