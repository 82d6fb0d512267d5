"""A draft head for the bundled model, fitted in a second: the next hidden state as a linear function of the one before
and the token. Its layer adds a little noise to that, so that its attention and its feed-forward count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.runtime.models.eagle_heads import random_head, write_head

WINDOW: Final = 256  # tokens that are read together
_TOKENS: Final = 5_000
_NOISE: Final = 0.02


def write_fitted_head(folder: Path) -> Path:
    """Returns the folder, which is made."""
    config: dict[str, Any] = json.loads((BUNDLED_FOLDER / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": config["hidden_size"] // 4}
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32).eval()
    embedding = model.model.embed_tokens.weight.detach()
    x, y = [], []
    with torch.inference_mode():
        for window in token_ids().split(WINDOW):
            hidden = model.model(window[None]).last_hidden_state[0]
            x.append(torch.cat([embedding[window[1:]], hidden[:-1]], dim=1))
            y.append(hidden[1:])
    inputs, wanted = torch.cat(x), torch.cat(y)
    tensors = random_head(config=config)
    tensors["fc.weight"] = solved(inputs, wanted)
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        tensors[name] *= _NOISE
    return write_head(folder, tensors, **config)


def solved(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The matrix [out, in] by which inputs [n, in] come nearest to what is wanted, [n, out], kept small a little."""
    ridge = 1e-3 * inputs.square().mean() * len(inputs) * torch.eye(inputs.shape[1])
    return torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ wanted).T


def token_ids() -> torch.Tensor:
    """Of the project's own sources, which look like what the model was trained on."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_FOLDER / "tokenizer.json"))
    sources = sorted((Path(__file__).parents[2] / "runtime").glob("*/*.py"))
    found: list[int] = []
    for source in sources:
        found += tokenizer.encode(source.read_text(encoding="utf-8")).ids
        if len(found) >= _TOKENS:
            break
    return torch.tensor(found[:_TOKENS])
