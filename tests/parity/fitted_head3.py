"""A draft head of EAGLE-3 for the bundled model, fitted in a second: the next hidden state as a linear function of what
three layers have left of the token before, and of the token. Its attention sees little but its own entry.

There are two: as its authors publish such heads, and in the format of Speculators, with a norm before the residual,
rows of padding, and its tensors in a file that torch.save has written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.parity.fitted_head import WINDOW, solved, token_ids
from tests.runtime.models.eagle_heads import write_head
from tests.runtime.models.wrapped_heads import wrapped

_KNOWN: Final = 3000  # tokens of its vocabulary, of the model's 4,096
_ROWS: Final = 3008  # with padding
_SHARP: Final = 30.0  # of queries and keys: what an entry next to a token counts beside its own, and all those before
_EPS: Final = 1e-5


def write_fitted_head3(folder: Path, *, in_wrapping: bool = False) -> Path:
    """Returns the folder, which is made."""
    config: dict[str, Any] = json.loads((BUNDLED_FOLDER / "config.json").read_text(encoding="utf-8"))
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32).eval()
    embedding = model.model.embed_tokens.weight.detach()
    tokens, read, left = [], [], []
    with torch.inference_mode():
        for window in token_ids().split(WINDOW):
            states = [one[0] for one in model.model(window[None], output_hidden_states=True).hidden_states]
            tokens.append(window[1:])
            read.append(torch.cat([states[2], states[layers // 2], states[layers - 3]], dim=1)[:-1])
            left.append(states[-1])
    fc = solved(torch.cat(read), torch.cat([states[:-1] for states in left]))
    before = torch.cat(read) @ fc.T
    joined = torch.cat([_normed(embedding[torch.cat(tokens)]), _normed(before)], dim=1)
    residual = _normed(before) if in_wrapping else before
    wanted = torch.cat([states[1:] for states in left])
    named = torch.bincount(token_ids(), minlength=vocab).argsort(descending=True)[:_KNOWN].sort().values
    generator = torch.Generator().manual_seed(0)
    middle, layer = config["intermediate_size"], "midlayer."
    tensors = {
        "fc.weight": fc,
        "norm.weight": torch.full((hidden,), float(wanted.square().mean().sqrt())),
        "lm_head.weight": model.lm_head.weight.detach()[named],
        "d2t": named - torch.arange(len(named)),
        f"{layer}self_attn.v_proj.weight": solved(joined, wanted - residual),
        f"{layer}self_attn.o_proj.weight": torch.eye(hidden),
        f"{layer}mlp.gate_proj.weight": torch.randn((middle, hidden), generator=generator) * 0.1,
        f"{layer}mlp.up_proj.weight": torch.randn((middle, hidden), generator=generator) * 0.1,
        f"{layer}mlp.down_proj.weight": torch.randn((hidden, middle), generator=generator) * 0.002,
    }
    for name in "qk":
        tensors[f"{layer}self_attn.{name}_proj.weight"] = torch.zeros(hidden, 2 * hidden)
        tensors[f"{layer}self_attn.{name}_proj.bias"] = torch.full((hidden,), _SHARP)
    for name in "vo":
        tensors[f"{layer}self_attn.{name}_proj.bias"] = torch.zeros(hidden)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = torch.ones(hidden)
    config |= {
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": hidden // 4,
        "rms_norm_eps": _EPS, "attention_bias": True, "draft_vocab_size": len(named),
        "architectures": ["LlamaForCausalLMEagle3"],
    }  # fmt: skip
    return _write_wrapped(folder, tensors, config) if in_wrapping else write_head(folder, tensors, **config)


def _write_wrapped(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    lm_head = tensors["lm_head.weight"]
    nobodys = torch.full((_ROWS - len(lm_head), lm_head.shape[1]), float("nan"))
    held = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    folder.mkdir()
    torch.save({**held, "lm_head.weight": torch.cat([lm_head, nobodys])}, folder / "pytorch_model.bin")
    layer = {key: value for key, value in config.items() if key != "draft_vocab_size"}
    keys = {**wrapped("eagle3", layer), "draft_vocab_size": len(lm_head), "norm_before_residual": True}
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return folder


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + _EPS)
