"""The engine's process: `python -m runahead.runtime.process.main`, started by a service's supervisor.

The first line of standard input is JSON: {"socket": path, "parent": its PID, "config": EngineConfig, "log": LogOutput}.
One line on standard output, `ready DEVICE`, says that the engine listens. It ends with its standard input, which its
parent closes or leaves at its death. It ignores signals, which are the parent's. Exit codes: 0 after a shutdown, 1 if
the chain broke, 2 if it could not start.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import resource
import secrets
import signal
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec
import structlog
import torch

from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.engine.figures import LogMode
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.engine.loop import Engine
from runahead.runtime.engine.ranges import name_stages
from runahead.runtime.log_output import LogOutput, count_dropped_lines_in, end_log, log_to_stderr
from runahead.runtime.models.cpu_check.cpu_kernels import NoKernelsError
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.progress import shown_loading
from runahead.runtime.process_end import signal_at_parents_death
from runahead.runtime.watchdog import LaunchHungError, LoopGuard, NoProgressError
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

EXIT_BROKEN: Final = 1
EXIT_CANNOT_START: Final = 2
_TURN_S: Final = 1.0  # a turn that only waits is much shorter
_DEVICE_SENTENCE: Final = "the device failed and the engine has stopped"
_INTERNAL_SENTENCE: Final = "the engine met an internal error and has stopped"
_SHUTDOWN_SENTENCE: Final = "the server is shutting down"


class Orders(msgspec.Struct, frozen=True):
    """The first line of standard input. parent: the PID of the process that starts and ends the engine. dropped_lines:
    where to count dropped log lines, as a file descriptor and the index of a 64-bit word.
    """

    socket: str
    parent: int
    config: EngineConfig
    log: LogOutput = LogOutput()
    dropped_lines: tuple[int, int] | None = None


def main() -> int:
    """Run the engine until its parent ends it or dies. Returns the exit code."""
    log = structlog.get_logger("engine")
    signal_at_parents_death()  # a start may wait for ranks that hang
    for number in (signal.SIGINT, signal.SIGTERM):  # also those sent to the process group: the parent handles them
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # no code here depends on small descriptor numbers
    try:
        orders = msgspec.json.decode(_first_line(), type=Orders)
        if os.getppid() != orders.parent:  # it ended before its end could be signaled
            raise ConfigError("the engine's parent has ended before the engine began")
        log_to_stderr(orders.log)
        if orders.dropped_lines is not None:
            count_dropped_lines_in(_word(*orders.dropped_lines))
        _check_nvtx(orders.config)
        parts = assemble(orders.config, shown_loading())
        links = SocketLinks(
            Path(orders.socket),
            m.Welcome(m.PROTOCOL_VERSION, secrets.token_hex(8), parts.info),
            lambda owner, why: log.warning("front_end_refused", owner=owner, why=why),
            parent_fd=sys.stdin.fileno(),
            connected=orders.config.counters_from,
        )
    except (ConfigError, CheckpointError, NoKernelsError, msgspec.MsgspecError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    # Wakes a stopped process, which then sees the end of its input and removes its socket's folder. The guard ends a
    # loop that does not come to that.
    signal_at_parents_death(signal.SIGCONT)
    gc.collect()
    gc.freeze()  # exempt everything made so far from garbage collection
    engine = Engine(
        parts.device,
        parts.scheduler,
        links,
        max_queue=orders.config.max_queue,
        poison=parts.poison,
        launch_timeout_s=orders.config.launch_timeout_s,
        log_interval=orders.config.log_interval,
        log_mode=LogMode(orders.config.log_mode),
        write_snapshot=lambda snapshot: log.info("snapshot", **asdict(snapshot)),
        run_ahead_asked=parts.info.run_ahead,
        masks=parts.masks,
    )
    if orders.config.nvtx:
        name_stages(engine, torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    log.info("chain", **engine.facts(parts.info), threads=torch.get_num_threads())
    log.info("engine_ready", **msgspec.to_builtins(parts.info))
    if orders.config.log_interval == 1 and orders.config.log_mode == "barrier":
        interval, mode = map(orders.config.spelling, ("log_interval", "log_mode"))
        log.warning("serial", why=f"{interval} is 1 and {mode} is barrier: the chain drains before every launch")
    print("ready", parts.info.device, flush=True)
    code = _run(engine, links, log, orders.config.launch_timeout_s)
    parts.masks.stop()
    return code


def _word(descriptor: int, index: int) -> memoryview:
    """Map an int64 word, [1], of shared memory. Closes the descriptor. Raises OSError."""
    shared = memoryview(mmap.mmap(descriptor, 0)).cast("q")
    os.close(descriptor)
    return shared[index : index + 1]


def _check_nvtx(config: EngineConfig) -> None:
    """Raise ConfigError if NVTX ranges are requested and torch has none."""
    if config.nvtx and not torch.backends.cuda.is_built():
        raise ConfigError(f"{config.spelling('nvtx')} needs a torch that is built for CUDA")


def _run(engine: Engine, links: SocketLinks, log: structlog.stdlib.BoundLogger, limit_s: float) -> int:
    code = 0
    guard = LoopGuard(lambda: engine.waits, limit_s + _TURN_S, lambda: _stop_standing(engine, log))
    guard.start()
    try:
        engine.run(links.parent_gone)
        links.broadcast(m.Failed("SHUTDOWN", _SHUTDOWN_SENTENCE))
        log.info("engine_stopped", launches=engine.ledger.launched)
    except Exception as error:
        code, is_device = EXIT_BROKEN, isinstance(error, DeviceError)
        if isinstance(error, LaunchHungError | NoProgressError):
            event = "launch_hung" if is_device else "no_progress"
            log.error(event, what=str(error), launches=engine.ledger.launched)
            _print_stacks()
        else:
            log.exception("device_failed" if is_device else "engine_failed", launches=engine.ledger.launched)
        failed = m.Failed("DEVICE", _DEVICE_SENTENCE) if is_device else m.Failed("INTERNAL", _INTERNAL_SENTENCE)
        links.broadcast(failed)
    guard.end()
    links.close()
    if links.parent_gone():  # nothing else can remove the folder that the parent made for the socket
        with contextlib.suppress(OSError):
            links.path.parent.rmdir()
    if code == 0:
        engine.device.close()
    return code


def _stop_standing(engine: Engine, log: structlog.stdlib.BoundLogger) -> None:
    """End a process whose loop has stopped: the sockets close with it, after a message."""
    log.error("loop_hung", launches=engine.ledger.launched)
    _print_stacks()
    end_log()
    os._exit(EXIT_BROKEN)


def _print_stacks() -> None:
    """Print the stacks of Python's threads to standard error."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if (frame := frames.get(thread.ident or 0)) is not None:
            print(f"Thread {thread.name}:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr)


def _first_line() -> bytes:
    """Read one line unbuffered: the rest stays in the pipe, whose end is watched."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise ConfigError("standard input ended before the engine's orders")
        line += byte
    return bytes(line)


if __name__ == "__main__":
    exit_code = main()
    if exit_code == EXIT_BROKEN:
        end_log()
        os._exit(exit_code)  # a hanging device would block an orderly exit
    sys.exit(exit_code)
