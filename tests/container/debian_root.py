"""`python -m tests.container.debian_root`, in namespaces of its own: makes a clean Debian, and the image's first
step in it.

As an image's base is, it is the smallest variant that Debian has, made by debootstrap from Debian's packages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Final

from tests.container.steps import run_step

_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("root", "cache", "suite", "step"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    root, cache = Path(arguments.root), Path(arguments.cache)
    kept = cache / f"{arguments.suite}.tar"
    if kept.exists():
        subprocess.run(["tar", "--extract", "--numeric-owner", "--file", kept, "--directory", root], check=True)
    else:
        bootstrap(root, cache, arguments.suite)
        new = kept.with_suffix(".new")
        subprocess.run(["tar", "--create", "--numeric-owner", "--file", new, "--directory", root, "."], check=True)
        new.rename(kept)
    run_step(root, arguments.step)


def bootstrap(root: Path, cache: Path, suite: str) -> None:
    """debootstrap's own, from the mirror that it has for a suite."""
    program = cache / "debootstrap"
    if not program.exists():
        fetched = cache / "debootstrap.new"
        subprocess.run(["rm", "-rf", fetched], check=True)
        fetched.mkdir()
        # `apt-get download` wants lists, which a fresh machine may not have. It installs nothing.
        command = "apt-get download -q debootstrap || { apt-get update -q && apt-get download -q debootstrap; }"
        subprocess.run(["sh", "-c", f"{command} && dpkg -x debootstrap_*.deb ."], cwd=fetched, check=True)
        fetched.rename(program)
    options = ["--variant=minbase", "--force-check-gpg", f"--keyring={_KEYRING}"]
    variables = {**os.environ, "DEBOOTSTRAP_DIR": str(program / "usr/share/debootstrap")}
    subprocess.run(["sh", program / "usr/sbin/debootstrap", *options, suite, root], env=variables, check=True)


if __name__ == "__main__":
    main()
