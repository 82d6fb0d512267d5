"""Run a rank that a signal ends between S and apply of one launch."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

from runahead.cuda_graphs.device import LaunchShape
from runahead.runtime.process.rank import main
from runahead.runtime.programs.cpu.program import HostProgram

LAUNCH: Final = 9
_APPLY: Final = HostProgram.apply


def apply_or_die(program: HostProgram, shape: LaunchShape) -> int:
    if shape.number == LAUNCH:
        os.kill(os.getpid(), signal.SIGKILL)
    return _APPLY(program, shape)


if __name__ == "__main__":
    HostProgram.apply = apply_or_die  # type: ignore[method-assign,assignment]
    sys.exit(main())
