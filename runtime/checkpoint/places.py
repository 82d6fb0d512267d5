"""Where a checkpoint lies, and which kind of reader its files need."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from runahead.runtime.checkpoint.checkpoint import Checkpoint
from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.folder import CONFIG, FolderCheckpoint
from runahead.runtime.checkpoint.refusals import GGUF, of_file, of_folder, of_head, refuse_no_gguf
from runahead.runtime.checkpoint.torch_archive import check_archive

BUNDLED: Final = "bundled"  # the name of the model that comes with the package
BUNDLED_FOLDER: Final = Path(__file__).parents[1] / "models" / BUNDLED
BUNDLED_HEAD: Final = BUNDLED_FOLDER / "draft_head"  # the head that was trained for it


def model_name(path: Path) -> str:
    """What the model at `path` is called where nobody gives it a name."""
    return path.stem if path.suffix.lower() == GGUF else path.name


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a folder in the layout of Hugging Face, or a GGUF file, whose header is read.

    Raises CheckpointError for what is neither, for a folder without `config.json`, and for a file whose header can't be
    read, each with what to do.
    """
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise of_folder(path)
        return FolderCheckpoint(path)
    if path.suffix.lower() != GGUF:
        raise of_file(path)
    refuse_no_gguf(path)
    try:
        from runahead.runtime.checkpoint.gguf_file import open_gguf  # not for a folder: it needs an extra
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} is a GGUF file, and the extra gguf is not installed: pip install 'runahead-server[gguf]'"
        ) from error
    return open_gguf(path)


def open_head(path: Path) -> FolderCheckpoint:
    """The draft head in a folder with `config.json` and `model.safetensors`, whose header is read, or else with
    `pytorch_model.bin`, which is looked at.

    Raises CheckpointError for what is none, or has its weights in another form, for a header that is wrong, and for a
    `pytorch_model.bin` that may hold something else than tensors.
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
    """Raises CheckpointError where the configuration can't be read, or where weights are asked for and their headers
    are missing or wrong. What the configuration says, the engine looks at."""
    checkpoint = open_checkpoint(path)
    checkpoint.config()
    if has_weights:
        checkpoint.tensors()
