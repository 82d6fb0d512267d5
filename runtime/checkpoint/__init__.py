"""A model's files, in either of two formats: a folder in the layout of Hugging Face, or one GGUF file.

Without torch: a front end looks too, and refuses what can't be served before an engine is started.
"""

from runahead.runtime.checkpoint.checkpoint import Checkpoint, StoredTensor
from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.places import (
    BUNDLED,
    BUNDLED_FOLDER,
    BUNDLED_HEAD,
    check_files,
    model_name,
    open_checkpoint,
    open_head,
)

__all__ = [
    "BUNDLED",
    "BUNDLED_FOLDER",
    "BUNDLED_HEAD",
    "Checkpoint",
    "CheckpointError",
    "StoredTensor",
    "check_files",
    "model_name",
    "open_checkpoint",
    "open_head",
]
