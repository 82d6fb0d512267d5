"""The version of the installed distribution, and its git commit if known.

In a checkout git is asked on demand. An installed package carries the commit in a file written by its build. setup.py
runs this file by path, so it imports nothing of this project.
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
    """Return `0.1.0+g0123456789ab`: the version and the commit, with `.dirty` for changed sources.

    `0.1.0` without a known commit; the version is 0 without an installed distribution.

    package: the folder with the build's commit file. checkout: the folder asked first, if it is a checkout.
    """
    try:
        number = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        number = "0"
    commit = commit_of(checkout) or _written_commit(package)
    return f"{number}+g{commit}" if commit else number


def commit_of(checkout: Path) -> str | None:
    """Return the first 12 digits of a checkout's commit, with `.dirty` for changed tracked files. None if the folder is
    not the root of a checkout or git fails.
    """
    if not (checkout / ".git").exists():  # inside another checkout, git would name that one's commit
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=.dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_commit(checkout: Path, package: Path, told: str = "") -> None:
    """Write the sources' commit into the package being built, replacing an older one.

    told: the commit if the sources are not a checkout, as in an image's build. Raises ValueError if it is malformed.
    """
    file = package / COMMIT_FILE
    if told and not _COMMIT.fullmatch(told):
        raise ValueError(f"{told!r} is not a commit: 7 to 40 hexadecimal digits, optionally with the suffix '.dirty'")
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
