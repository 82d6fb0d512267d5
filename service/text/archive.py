"""Packs a tokenizer's files into a zip archive for clients that tokenize."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Final

_LEVEL: Final = 1  # of compression


def archive_of(description: str, chat_template: str | None, template_tokens: Mapping[str, str]) -> bytes:
    """Make the archive's bytes, a function of the arguments only.

    description: the text of `tokenizer.json`. chat_template, template_tokens: of `TextTokenizer`, for
    `tokenizer_config.json`.
    """
    config = {**template_tokens} | ({} if chat_template is None else {"chat_template": chat_template})
    files = {
        "tokenizer.json": description,
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, sort_keys=True),
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)  # with a fixed date
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED, _LEVEL)
    return made.getvalue()
