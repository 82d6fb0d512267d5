"""`runahead completion SHELL`: a script, for a shell to read at its start, that completes commands, flags and values.

shtab writes it from the parser, once: pressing the tab key starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")


def completion_script(parser: argparse.ArgumentParser, actions: list[argparse.Action], shell: str) -> str:
    """The script for one of SHELLS. actions: those of the parser's commands. Those that show FILE or FOLDER for their
    value are told here that they are paths."""
    import shtab  # takes longer to load than the rest of the command line, and nothing else uses it

    for action in actions:
        if action.metavar in ("FILE", "PATH"):  # of files it offers folders too
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "FOLDER":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)
