"""A model's files: a folder in the Hugging Face layout, or one GGUF file.

Imports no torch: a front end reads them too, and unsupported files are refused before an engine starts.
"""

from runahead.runtime.checkpoint.checkpoint import Checkpoint, StoredTensor
from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.locate import (
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
