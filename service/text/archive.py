"""A tokenizer as files in a zip archive, for those who tokenize by themselves."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from typing import Final

_LEVEL: Final = 1  # of compression: the vocabulary of a large model takes a fraction of a second


class Archiving:
    """Makes the archive in one turn. describe: the text of `tokenizer.json`.

    chat_template, template_tokens: of `TextTokenizer`. archive: the bytes, afterwards, which these alone decide.
    """

    is_long = True

    def __init__(
        self, describe: Callable[[], str], chat_template: str | None, template_tokens: Mapping[str, str]
    ) -> None:
        self._describe = describe
        self._config = {**template_tokens} | ({} if chat_template is None else {"chat_template": chat_template})
        self.archive = b""

    def turn(self) -> bool:
        files = {
            "tokenizer.json": self._describe(),
            "tokenizer_config.json": json.dumps(self._config, ensure_ascii=False, sort_keys=True),
        }
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for name, text in files.items():
                entry = zipfile.ZipInfo(name)  # with a date that is always the same
                archive.writestr(entry, text, zipfile.ZIP_DEFLATED, _LEVEL)
        self.archive = made.getvalue()
        return True
