"""Which runahead this is: the version of the installed distribution, and the commit where it is known.

A checkout is asked for its commit when somebody wants to know it. An installed package carries the commit in a file
that the build has written, if the build's sources were a checkout. setup.py runs this file by its path, so it imports
nothing of ours.
"""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "runahead-server"
COMMIT_FILE: Final = "commit.txt"

_PACKAGE: Final = Path(__file__).resolve().parent
_GIT_TIMEOUT_S: Final = 10
_COMMIT: Final = re.compile(r"[0-9a-f]{7,40}(\.dirty)?")


def full_version(package: Path = _PACKAGE, checkout: Path = _PACKAGE.parent) -> str:
    """`0.1.0+g0123456789ab`: the number, and the commit with `.dirty` behind it where the sources differed from it.

    `0.1.0` where no commit is known; 0 in place of the number where no distribution is installed.

    package: the folder where the build writes the commit. checkout: the folder that is asked before, if it is one.
    """
    try:
        number = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        number = "0"
    commit = commit_of(checkout) or _written_commit(package)
    return f"{number}+g{commit}" if commit else number


def commit_of(checkout: Path) -> str | None:
    """The first 12 digits of the commit that a folder is a git checkout of, with `.dirty` behind them where files that
    git tracks have changed. None where the folder is no checkout of its own, or where git can't be asked."""
    if not (checkout / ".git").exists():  # inside somebody else's checkout, git would name a commit of theirs
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=.dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_commit(checkout: Path, package: Path, told: str = "") -> None:
    """The build's part: leaves the commit of the sources in the package that is being built, and no older one.

    told: the commit of sources that are no checkout, as they are when an image is built. Raises ValueError where it is
    none.
    """
    file = package / COMMIT_FILE
    if told and not _COMMIT.fullmatch(told):
        raise ValueError(f"{told!r} is no commit: 7 to 40 hexadecimal digits, perhaps with '.dirty' behind them")
    commit = commit_of(checkout) or told
    if not commit:
        file.unlink(missing_ok=True)
    else:
        package.mkdir(parents=True, exist_ok=True)
        file.write_text(commit + "\n", encoding="utf-8")


def _written_commit(package: Path) -> str | None:
    try:
        return (package / COMMIT_FILE).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
