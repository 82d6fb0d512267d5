"""Checks the package that renders templates, without loading it."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Final

_LEAST: Final = (3, 1, 6)  # earlier versions have known ways out of the sandbox
_INSTALL: Final = "pip install 'runahead-server[chat]'"


def why_no_jinja2() -> str:
    """Say why templates can't be rendered and how to fix it, as a sentence without a period. Empty if they can."""
    least = ".".join(map(str, _LEAST))
    try:
        found = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        return f"the package jinja2, which renders chat templates, is not installed: {_INSTALL}"
    if tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < _LEAST:
        return f"chat templates need jinja2 {least} or newer, and {found} is installed: {_INSTALL}"
    return ""
