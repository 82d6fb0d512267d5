"""A step of deploy/container/install.sh in a root, with the mounts that the Containerfile gives it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from tests.project.repository import ROOT

SCRIPTS: Final = ROOT / "deploy/container"
# What a container's root process has of variables while an image is built.
VARIABLES: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def run_step(root: Path, step: str, wheels: Path | None = None) -> None:
    """`root` sees deploy/container at /srv, `wheels` at /mnt, neither of which it can write to, and processes at /proc.

    step: the rest of the command line behind install.sh. Raises CalledProcessError where it fails.
    """
    bound = {"srv": SCRIPTS, **({} if wheels is None else {"mnt": wheels})}
    for place, folder in bound.items():
        mount("--bind", folder, root / place)
        mount("-o", "remount,bind,ro", root / place)
    mount("-t", "proc", "proc", root / "proc")
    subprocess.run(["chroot", root, "sh", "/srv/install.sh", *step.split()], env=VARIABLES, check=True)
    for place in ("proc", *bound):
        subprocess.run(["umount", root / place], check=True)
