"""Commands that can't leave anything behind: their namespaces end with them, and with who started them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Final

from tests.project.repository import ROOT

_UNSHARE: Final = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
_WITHOUT_NETWORK: Final = "--net"


class NotPermittedError(RuntimeError):
    """This machine does not let this user make namespaces."""


class CommandFailed(RuntimeError):
    """A command in namespaces of its own ended with another status than 0."""


def check_permission() -> None:
    """Raises NotPermittedError unless namespaces can be made, with and without a network."""
    tried = subprocess.run([*_UNSHARE, _WITHOUT_NETWORK, "true"], capture_output=True, text=True)
    if os.geteuid() != 0 or tried.returncode != 0:
        raise NotPermittedError(
            "a clean root needs root, and a machine that lets root make namespaces for mounts, processes and networks "
            f"(unshare); nothing was tried. {tried.stderr.strip()}".strip()
        )


def confined(
    command: Sequence[str],
    *,
    network: bool,
    variables: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
    output: IO[bytes] | None = None,
) -> None:
    """Runs a command in namespaces of its own, for mounts, processes and, without `network`, interfaces. What it mounts
    is seen by nobody else.

    When this returns or raises, nothing of it runs and none of its mounts is left, however it has ended; if this
    process is killed, the same soon holds. variables: of its environment, or else this process'. keep: descriptors that
    it is to hold. output: for all that it prints, or else it goes where this process' goes. Raises CommandFailed.
    """
    first = [sys.executable, "-m", "tests.container.confinement"]
    process = subprocess.Popen(
        [*_UNSHARE, *([] if network else [_WITHOUT_NETWORK]), "--", *first, *command],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=keep,
    )
    assert process.stdin is not None
    try:
        code = process.wait()
    finally:
        # The first process sees the end of its input and ends. The kernel ends all others with it, before unshare,
        # which waits for it, goes too.
        process.stdin.close()
        process.wait()
    if code != 0:
        raise CommandFailed(f"{' '.join(command)}: exit {code}")


def _first_process(command: Sequence[str]) -> int:
    """The status of a command; or ends all, when whoever started this closes its input, as who is killed does too."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="starter", daemon=True).start()
    return subprocess.run(command, stdin=subprocess.DEVNULL, close_fds=False).returncode


if __name__ == "__main__":
    sys.exit(_first_process(sys.argv[1:]))
