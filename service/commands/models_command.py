"""`runahead models`: prints the architectures that are served."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Final

# Lists them: a process of its own, since the engine's floors are not for the service to load.
_LISTING: Final = "runahead.runtime.models"


def run(parsed: argparse.Namespace) -> int:
    """Returns the exit code of the process that knows them."""
    done = subprocess.run([sys.executable, "-P", "-m", _LISTING], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    return done.returncode
