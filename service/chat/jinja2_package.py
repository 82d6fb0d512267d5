"""The package that renders templates. Nothing of it is loaded here."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Final

_LEAST: Final = (3, 1, 6)  # those before have known ways out of the sandbox
_INSTALL: Final = "pip install 'runahead-server[chat]'"


def why_no_jinja2() -> str:
    """Why no template can be rendered here, and how to mend it: a sentence without its end. Empty: it can."""
    least = ".".join(map(str, _LEAST))
    try:
        found = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        return f"the package jinja2, which renders chat templates, is not installed: {_INSTALL}"
    if tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < _LEAST:
        return f"chat templates need jinja2 {least} or newer, and {found} is installed: {_INSTALL}"
    return ""
