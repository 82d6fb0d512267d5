"""`python -m tests.container`: the image for CPUs, installed in a clean root by the Containerfile's steps, serves.

There is no container engine in this: a Debian root is made by debootstrap, and install.sh does in it what it does for
the Containerfile. Then the service is started as the Containerfile says, as its user, with a tree that is read-only and
without a network, and has to be healthy, to generate, and to end when it is asked. The machine's own system is not
touched: every mount and process is in namespaces that end with this one, and everything else is below one folder.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from runahead.service.version import commit_of
from tests.container.confinement import CommandFailed, NotPermittedError, check_permission, confined
from tests.container.containerfile import Target, read_containerfile
from tests.container.steps import SCRIPTS
from tests.mutants.trial import files_of_the_tree
from tests.project.repository import ROOT

TARGET: Final = "cpu"
NO_COMMIT: Final = "0" * 12
"""As git itself writes what is no commit."""
PYTHONS: Final = {"bookworm": "3.11"}
"""What each suite of Debian has, by which its wheels are chosen while there is no root yet that could be asked."""


def main() -> int:
    """0: the image serves. 1: it does not, or this machine does not let us find out."""
    parser = argparse.ArgumentParser(prog="python -m tests.container", description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / ".venv/container",
        help="for the root, and for the base of it that is kept",
    )
    folder: Path = parser.parse_args().folder
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    try:
        check_permission()
        with work_folder(folder) as (work, lock):
            try_image(folder, work, lock)
    except (CommandFailed, NotPermittedError, subprocess.CalledProcessError) as error:
        print(f"container: {error}", file=sys.stderr)
        return 1
    print(f"container: the image serves ({time.monotonic() - begun:.0f} s)")
    return 0


@contextmanager
def work_folder(folder: Path) -> Iterator[tuple[Path, int]]:
    """An empty folder in this one, gone afterwards, and a lock on it. Waits for others that use the same."""
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / "work"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove(work)  # what a run has left that was killed
        work.mkdir(mode=0o755)
        try:
            yield work, lock.fileno()
        finally:
            remove(work)


def remove(work: Path) -> None:
    """Nothing is mounted there: every mount is in a namespace that has ended. --one-file-system is for the case that
    this is wrong."""
    subprocess.run(["rm", "-rf", "--one-file-system", work], check=True)


def try_image(folder: Path, work: Path, lock: int) -> None:
    """Each step, with what it took. folder: for what is kept. Raises CommandFailed and CalledProcessError."""
    root = work / "root"
    root.mkdir(mode=0o755)
    containerfile = read_containerfile(ROOT / "Containerfile")
    target = containerfile.targets[TARGET]
    suite = containerfile.args["BASE"].partition(":")[2].removesuffix("-slim")
    with measured(f"a root of Debian {suite}, and the step 'system'"):
        command = [sys.executable, "-m", "tests.container.debian_root", str(root), str(folder), suite, target.steps[0]]
        with (work / "root.log").open("w+b") as log:
            try:
                confined(command, network=True, keep=[lock], output=log)
            except CommandFailed:
                log.seek(0)
                sys.stdout.write(log.read().decode(errors="replace"))
                raise
    with measured("the wheels"):
        commit = commit_of(ROOT) or NO_COMMIT
        wheels = make_wheels(work, lock, containerfile.targets[f"wheels-{TARGET}"], PYTHONS[suite], commit)
    with measured("the step 'package', and the service in it"):
        command = [sys.executable, "-m", "tests.container.serving", str(root), str(wheels), TARGET, commit]
        confined(command, network=False, keep=[lock])


@contextmanager
def measured(what: str) -> Iterator[None]:
    print(f"container: {what} ...", flush=True)
    begun = time.monotonic()
    yield
    print(f"container: {what}: {time.monotonic() - begun:.0f} s", flush=True)


def make_wheels(work: Path, lock: int, target: Target, python: str, commit: str) -> Path:
    """The step 'wheels', by this environment's pip: only here is known where this machine gets packages. It is given
    what COPY takes, of the files that git knows."""
    sources, wheels = work / "sources", work / "wheels"
    for path in files_of_the_tree():
        if any(path.is_relative_to(copied) for copied in target.copied) and "_pb2" not in path.name:
            (sources / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, sources / path)
    variables = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHON_VERSION": python,
        "EXTRAS": target.args["EXTRAS"],
        "REVISION": commit,
    }
    command = ["sh", str(SCRIPTS / "install.sh"), "wheels", TARGET, str(sources), str(wheels)]
    confined(command, network=True, variables=variables, keep=[lock])
    return wheels


if __name__ == "__main__":
    sys.exit(main())
