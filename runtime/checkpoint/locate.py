"""Locates checkpoints and chooses their readers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runahead.runtime.checkpoint.checkpoint import Checkpoint
from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.folder import CONFIG, FolderCheckpoint
from runahead.runtime.checkpoint.refusals import GGUF, of_file, of_folder, of_head, refuse_no_gguf
from runahead.runtime.checkpoint.torch_archive import check_archive

BUNDLED: Final = "bundled"  # the name of the packaged model
BUNDLED_FOLDER: Final = Path(__file__).parents[1] / "models" / BUNDLED
BUNDLED_HEAD: Final = BUNDLED_FOLDER / "draft_head"  # its draft head


def model_name(path: Path) -> str:
    """Return the default name of the model at `path`."""
    return path.stem if path.suffix.lower() == GGUF else path.name


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`: a folder in the Hugging Face layout, or a GGUF file, whose header is read.

    Raises CheckpointError with a remedy for neither, a folder without `config.json`, and an unreadable header.
    """
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise of_folder(path)
        return FolderCheckpoint(path)
    if path.suffix.lower() != GGUF:
        raise of_file(path)
    refuse_no_gguf(path)
    try:
        from runahead.runtime.checkpoint.gguf_file import open_gguf  # on demand: it needs an extra
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} is a GGUF file, and the extra gguf is not installed: pip install 'runahead-server[gguf]'"
        ) from error
    return open_gguf(path)


def open_head(path: Path) -> FolderCheckpoint:
    """Open a draft head's folder: `config.json`, and `model.safetensors` or `pytorch_model.bin`, whose headers are
    checked.

    Raises CheckpointError for a folder without a head, weights in another form, an invalid header, and a
    `pytorch_model.bin` that may hold other objects than tensors.
    """
    head = FolderCheckpoint(path)
    if not (path / CONFIG).is_file() or not (head.has_safetensors or head.torch_file.is_file()):
        raise of_head(path)
    if head.has_safetensors:
        head.tensors()
    else:
        check_archive(head.torch_file)
    return head


def check_files(path: Path, *, has_weights: bool) -> None:
    """Raise CheckpointError for an unreadable configuration, or, if weights are read, missing or invalid headers. The
    engine validates the configuration's content.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.config()
    if has_weights:
        checkpoint.tensors()
