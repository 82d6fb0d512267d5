"""Finds the files of a model that a setting names."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

from runahead.runtime.checkpoint import BUNDLED, BUNDLED_FOLDER
from runahead.runtime.wire.setting import shown
from runahead.service.settings.variables import SettingsError

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def head_path(folder: str) -> str:
    """Return the path of a draft head or model, empty without one."""
    with contextlib.suppress(RuntimeError):  # an unknown user's home
        return str(Path(folder).expanduser().absolute()) if folder else ""
    return folder


def model_path(model: str) -> Path:
    """Return the path of a model's folder or file."""
    if model == BUNDLED:
        return BUNDLED_FOLDER
    if not model:  # an empty path would mean the current folder
        raise SettingsError("model is empty: give 'bundled', a folder with config.json, or a GGUF file")
    with contextlib.suppress(OSError, RuntimeError):  # too long a path, or an unknown user's home
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.exists():
            return path.absolute()  # keeps a link's name: a download cache names link targets by hash
    if not model.endswith(".gguf") and _HUB_ID.fullmatch(model):
        name = model.split("/")[1]
        raise SettingsError(
            f"model {model!r} is not a folder here and looks like a hub id; the service downloads nothing, so fetch "
            f"it first with `hf download {model} --local-dir {name}` and then give `--model {name}`"
        )
    raise SettingsError(
        f"model {shown(model)} is neither a folder nor a file; give a folder with config.json, safetensors and "
        "tokenizer.json, or a GGUF file"
    )
