"""The bundled model as a MiMo, with a head that is fitted in a second: the next hidden state as a linear function of
the one before and the token. Its layer adds a little noise to that, so that its attention and its feed-forward count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.parity.fitted_head import WINDOW, solved, token_ids
from tests.runtime.models.mimo_heads import BEGIN, as_mimo, random_head

_NOISE: Final = 0.02
_EPS: Final = 1e-5


def write_fitted_mimo(folder: Path) -> Path:
    """Returns the folder, which is made. Its model says what the bundled one says."""
    config = json.loads((BUNDLED_FOLDER / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32).eval()
    embedding = model.model.embed_tokens.weight.detach()
    x, y = [], []
    with torch.inference_mode():
        for window in token_ids().split(WINDOW):
            hidden = model.model(window[None]).last_hidden_state[0]
            x.append(torch.cat([_normed(hidden[:-1]), _normed(embedding[window[1:]])], dim=1))
            y.append(hidden[1:])
    head = random_head(config=config)
    for name, tensor in head.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    head[f"{BEGIN}final_layernorm.weight"] *= float(torch.cat(y).square().mean().sqrt())
    head[f"{BEGIN}input_proj.weight"] = solved(torch.cat(x), torch.cat(y))
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        head[BEGIN + name] *= _NOISE
    as_mimo(BUNDLED_FOLDER, folder, {name: tensor.contiguous() for name, tensor in head.items()})
    return folder


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + _EPS)
