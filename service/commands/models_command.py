"""`runahead models`: prints the supported architectures."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Final

# Run in a separate process, because the service must not import the engine's packages.
_LISTING: Final = "runahead.runtime.models"


def run(parsed: argparse.Namespace) -> int:
    """List the architectures. Returns the process's exit code."""
    done = subprocess.run([sys.executable, "-P", "-m", _LISTING], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    return done.returncode
