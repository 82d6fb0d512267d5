"""The bundled model with fewer layers: it drafts for the whole one, and is quantized in less time."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import BUNDLED_FOLDER


def write_shortened_model(folder: Path, layers: int = 5) -> Path:
    """Returns the folder, which is made. layers: the first ones, which it keeps."""
    folder.mkdir()
    config = json.loads((BUNDLED_FOLDER / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes((BUNDLED_FOLDER / "tokenizer.json").read_bytes())
    tensors = load_file(BUNDLED_FOLDER / "model.safetensors")
    left_out = tuple(f"model.layers.{number}." for number in range(layers, config["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder
