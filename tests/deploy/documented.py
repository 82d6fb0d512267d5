"""The commands of docs/operations.md."""

from __future__ import annotations

import re
from typing import Final

from tests.project.repository import ROOT

TEXT: Final = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCKS: Final[list[tuple[str, str]]] = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def line_with(words: str) -> str:
    """The one line of the document's commands that has these words."""
    lines = {line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()}
    (found,) = (line for line in lines if words in line and "--dry-run" not in line)
    return found


def block_with(words: str) -> str:
    """The one block of commands that has these words."""
    (found,) = (block for kind, block in BLOCKS if kind == "sh" and words in block)
    return found


def blocks_of(document: str) -> list[str]:
    """The blocks of commands of another document."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
