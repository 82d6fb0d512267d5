"""A model that drafts for the bundled one: the same without its last layer."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from runahead.runtime.checkpoint import BUNDLED_FOLDER


def write_shortened_model(folder: Path) -> Path:
    """Returns the folder, which is made."""
    folder.mkdir()
    config = json.loads((BUNDLED_FOLDER / "config.json").read_text(encoding="utf-8"))
    last = config["num_hidden_layers"] - 1
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": last}), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes((BUNDLED_FOLDER / "tokenizer.json").read_bytes())
    tensors = load_file(BUNDLED_FOLDER / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"model.layers.{last}.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder
