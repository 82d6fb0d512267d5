"""Draft heads of EAGLE-3 for tests: random ones, one that is always right, and what a head proposes by its definition.

The definition is that of Li, Wei, Zhang, Zhang, 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language
Models via Training-Time Test", with what the authors' own model code says of norms and of the order of things: g = fc
([what three of the target's layers leave]); of the embedding e of token t and the state h before it, which is g of
t - 1 or what the head has left there, x = h + attention([norm(e), norm(h)]), then a Llama's feed-forward; the head's
norm and matrix make logits of x; its token i is i + d2t[i] of the target. With norm_before_residual, x = norm(h) +
attention(...); with norm_before_fc, g = fc(norm([what three layers leave])); with fc_norm, g = fc([norm(what a layer
leaves), ...]), each with a norm of its own; with norm_output the head leaves its norm of x in place of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.runtime.models.eagle_heads import CONFIG, HIDDEN, VOCAB, save_foreseen, write_head
from tests.runtime.models.head_arithmetic import Floats, attended, gated, normed

KNOWN = 100  # tokens of the draft vocabulary
NARROW = 48  # numbers of a hidden state of a head that is not as wide as its target
READS = (2, 1, 0)  # where none are named, of a target of three layers
OWN = {"draft_vocab_size": KNOWN, "architectures": ["LlamaForCausalLMEagle3"]}
WHOLE = {"draft_vocab_size": VOCAB, "architectures": ["Eagle3LlamaForCausalLM"]}  # whose vocabulary is the target's


def random_head(
    seed: int = 0, *, width: int = HIDDEN, known: int = KNOWN, norms: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Tensors by the names that published heads have. width: of a hidden state of its own; another than the target's
    comes with an embedding. known: tokens of the draft vocabulary; all of the target's come without d2t. norms: keys of
    those that the authors' own heads do not have."""
    generator = torch.Generator().manual_seed(seed)
    dim, middle = width // CONFIG["num_attention_heads"], CONFIG["intermediate_size"]
    of_keys = CONFIG["num_key_value_heads"] * dim
    shapes = {
        "fc.weight": (width, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (of_keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (of_keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.mlp.gate_proj.weight": (middle, width),
        "midlayer.mlp.up_proj.weight": (middle, width),
        "midlayer.mlp.down_proj.weight": (width, middle),
        "norm.weight": (width,),
        "lm_head.weight": (known, width),
    }
    if "norm_before_fc" in norms:
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    if "fc_norm" in norms:
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in tensors:
        if "norm." in name:
            tensors[name] += 1.0
    if width != HIDDEN:
        tensors["embed_tokens.weight"] = torch.randn((VOCAB, width), generator=generator)
    if known != VOCAB:
        named = torch.randperm(VOCAB, generator=generator)[:known].sort().values
        tensors["d2t"] = named - torch.arange(known)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), named)
    return tensors


def save_foreseen3(target: Path, head: Path) -> None:
    """As `save_foreseen` of EAGLE-1. The head's attention sees its own entry alone, so high are the scores where
    nothing is rotated, and passes on norm(e) - norm(h), so that the layer leaves norm(e). Its vocabulary is the
    target's in another order."""
    save_foreseen(target, head)
    own = random_head(1, known=VOCAB)
    for name, tensor in own.items():
        tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    one, attention = torch.eye(HIDDEN), "midlayer.self_attn."
    for name in ("q_proj", "k_proj"):
        own[f"{attention}{name}.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
        own[f"{attention}{name}.bias"] = torch.full((HIDDEN,), 1e3)
    own[f"{attention}v_proj.weight"], own[f"{attention}o_proj.weight"] = torch.cat([one, -one], dim=1), one
    own[f"{attention}v_proj.bias"], own[f"{attention}o_proj.bias"] = torch.zeros(HIDDEN), torch.zeros(HIDDEN)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
    own["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"][order]
    own["d2t"] = order - torch.arange(VOCAB)
    write_head(head, own, **WHOLE, attention_bias=True, num_key_value_heads=CONFIG["num_attention_heads"])


class HeadByDefinition:
    """tensors: of a head. embedding, lm_head: of its target, [vocab, hidden]. reads: after how many of its layers.
    norms: as `random_head` has them. All is float64."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        reads: tuple[int, ...] = READS,
        norms: Sequence[str] = (),
    ) -> None:
        self._own = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self._embedding = self._own.get("embed_tokens.weight", embedding.detach().double().numpy())
        self._lm_head = self._own.get("lm_head.weight", lm_head.detach().double().numpy())
        self._to_target = self._own.get("d2t", np.zeros(len(self._lm_head))).astype(np.int64)
        self._reads, self._norms = reads, norms

    def proposes(self, tokens: list[int], states: list[Floats], count: int) -> list[int]:
        """As `HeadByDefinition.proposes` of EAGLE-1."""
        eps = CONFIG["rms_norm_eps"]
        read = [states[layers][: len(tokens) - 1] for layers in self._reads]
        if "fc_norm" in self._norms:
            read = [normed(state, self._own[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(read)]
        wide = np.concatenate(read, axis=1)
        if "norm_before_fc" in self._norms:
            wide = normed(wide, self._own["input_norm.weight"], eps)
        known, of_tokens = list(tokens), list(wide @ self._own["fc.weight"].T)
        found: list[int] = []
        for _ in range(count):
            left = self._last(known, np.stack(of_tokens))
            ended = normed(left, self._own["norm.weight"], eps)
            logits = self._lm_head @ ended
            best = int(np.argmax(logits))
            found.append(best + int(self._to_target[best]))
            known.append(found[-1])
            of_tokens.append(ended if "norm_output" in self._norms else left)
        return found

    def _last(self, tokens: list[int], states: Floats) -> Floats:
        """What the layer leaves of the last of these tokens. states: [tokens - 1, width]."""
        own, eps = self._own, CONFIG["rms_norm_eps"]
        of_token = normed(self._embedding[tokens[1:]], own["midlayer.input_layernorm.weight"], eps)
        of_state = normed(states, own["midlayer.hidden_norm.weight"], eps)
        joined = np.concatenate([of_token, of_state], axis=1)
        residual = of_state if "norm_before_residual" in self._norms else states
        heads, theta = CONFIG["num_attention_heads"], CONFIG["rope_theta"]
        last: Floats = (residual + attended(joined, own, "midlayer.self_attn.", heads, theta))[-1]
        return last + gated(normed(last, own["midlayer.post_attention_layernorm.weight"], eps), own, "midlayer.mlp.")


def write_head3(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """As `write_head`, with the keys that a head of EAGLE-3 has."""
    return write_head(folder, tensors, **{**OWN, **changes})
