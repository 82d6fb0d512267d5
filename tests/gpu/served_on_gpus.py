"""The command line of a service whose ranks may share the one GPU of the machine: `python -m tests.gpu.served_on_gpus
serve`. With the engine's module behind it, it is the engine's process.
"""

from __future__ import annotations

import runpy
import sys

from runahead.service.processes.children import ENGINE_MODULE, EngineProcess


def engine() -> None:
    from runahead.runtime.process import cuda
    from tests.gpu.exchanges_on_gpus import gpus

    cuda.make_on_cuda.__defaults__ = (gpus(),)
    sys.argv = [ENGINE_MODULE]
    runpy.run_module(ENGINE_MODULE, run_name="__main__", alter_sys=True)


def service() -> int:
    from runahead.service.main import main

    command = (sys.executable, "-P", "-m", "tests.gpu.served_on_gpus", ENGINE_MODULE)
    EngineProcess.start.__func__.__defaults__ = (command, None)  # type: ignore[attr-defined]
    return main()


if __name__ == "__main__":
    if sys.argv[1:] == [ENGINE_MODULE]:
        engine()
    else:
        raise SystemExit(service())
