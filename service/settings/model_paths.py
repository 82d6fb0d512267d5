"""Where the files of a model are that a setting names."""

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
    """Of the files of a draft head or model; empty where there are none."""
    with contextlib.suppress(RuntimeError):  # the home of somebody unknown
        return str(Path(folder).expanduser().absolute()) if folder else ""
    return folder


def model_path(model: str) -> Path:
    """Of a folder or a file, of whatever kind it is."""
    if model == BUNDLED:
        return BUNDLED_FOLDER
    if not model:  # as a path it would be the folder that one is in
        raise SettingsError(
            "model is empty, which is no folder and no file: give 'bundled', a folder with config.json, or a GGUF file"
        )
    with contextlib.suppress(OSError, RuntimeError):  # too long for a path, or the home of somebody unknown
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.exists():
            return path.absolute()  # a link's own name: a download cache has other names for what links lead to
    if not model.endswith(".gguf") and _HUB_ID.fullmatch(model):
        name = model.split("/")[1]
        raise SettingsError(
            f"model {model!r} is no folder here and looks like a hub id; nothing is downloaded while serving, so fetch "
            f"it first with `hf download {model} --local-dir {name}` and then give `--model {name}`"
        )
    raise SettingsError(
        f"model {shown(model)} is no folder and no file; give a folder with config.json, safetensors and "
        "tokenizer.json, or a GGUF file"
    )
