"""Checks for the grammar library, an extra, without loading it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

EXTRA: Final = "structure"
INSTALL: Final = f"pip install 'runahead-server[{EXTRA}]'"


def is_installed() -> bool:
    """Whether this interpreter has the extra."""
    return find_spec("llguidance") is not None
