"""`runahead completion SHELL`: prints a script that completes commands, flags and values.

shtab makes it once from the parser: the tab key starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")


def completion_script(parser: argparse.ArgumentParser, actions: list[argparse.Action], shell: str) -> str:
    """Make the script for one of SHELLS. actions: of the commands' parsers; those with FILE or FOLDER complete
    paths.
    """
    import shtab  # slow to load, and used only here

    for action in actions:
        if action.metavar in ("FILE", "PATH"):  # completes folders too
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "FOLDER":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)
