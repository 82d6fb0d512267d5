"""Where a checkpoint lies and which files it has, in the layout of Hugging Face. Without torch: front ends look too."""

from __future__ import annotations

from pathlib import Path
from typing import Final

BUNDLED: Final = "bundled"  # the name of the model that comes with the package
BUNDLED_FOLDER: Final = Path(__file__).parent / "models" / BUNDLED

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
WEIGHTS: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"  # which of several files has which tensor
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"


class CheckpointError(ValueError):
    """A checkpoint that is not served. The sentence names the file, the key or the tensor."""
