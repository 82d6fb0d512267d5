"""The entry point of `runahead`: imports almost nothing, and never ends with a traceback."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Final

from runahead.service.commands.ends import EXIT_INTERRUPTED, end_at_interrupts, nobody_reads

_SERVERS: Final = ("serve", "kernels")  # these write nothing to standard output
_OF_OUTPUT: Final = (errno.EBADF, errno.EIO, errno.ENOSPC)
_STANDARD: Final = 3  # descriptors: input, output and errors


def main() -> int:
    """Run one command and return the exit status. 1: standard output can't be written. 130: interrupted."""
    is_open = _open_standard_streams()
    end_at_interrupts()  # while modules load; commands call `interruptible` later
    if not is_open and sys.argv[1:2] not in ([name] for name in _SERVERS):
        return _not_written("it is closed")
    from runahead.service import cli

    try:
        try:
            return cli.main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        return nobody_reads()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        return _not_written(error.strerror or "it is closed")


def _not_written(why: str) -> int:
    with suppress(OSError):
        print(f"runahead: standard output can't be written: {why}", file=sys.stderr)
    return nobody_reads()


def _open_standard_streams() -> bool:
    """Replace closed standard descriptors by the null device, so that no file or socket gets their numbers. Returns
    whether standard output was open.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < _STANDARD:
        os.set_inheritable(number, True)
    os.close(number)
    is_open = sys.stdout is not None
    sys.stdin = sys.stdin or os.fdopen(0, "r")
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    return is_open
