"""The service as a whole: the engine's process, the front end, and their lives."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from runahead.runtime.checkpoint import TOKENIZER, CheckpointError, check_files
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, Spelling, check_config
from runahead.runtime.wire.setting import settings_of
from runahead.service.engine_client import SocketEngineClient
from runahead.service.engine_process import EngineProcess, EngineStartError
from runahead.service.front_end import FrontEnd
from runahead.service.logs import configure_logs
from runahead.service.pulse import EngineWatch, stuck_after_s
from runahead.service.request_stream import EngineLostError
from runahead.service.security import check_security, load_security
from runahead.service.settings import FrontEndSettings
from runahead.service.tokenizer import TextTokenizer, load_tokenizer

T = TypeVar("T")

EXIT_OK: Final = 0
EXIT_ENGINE_LOST: Final = 1
EXIT_CANNOT_START: Final = 2

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a server is started with.

    engine: the engine's own settings; its checkpoint folder is where the tokenizer is, too.
    front_end: those of this process; `model` in them has become the engine's folder.
    linger_s: how long NOT_SERVING is shown after the engine was lost, before the server stops.
    """

    engine: EngineConfig
    front_end: FrontEndSettings = field(default_factory=FrontEndSettings)
    linger_s: float = 1.0


def check_server_config(config: ServerConfig) -> None:
    """Raises ConfigError for a configuration that is invalid."""
    spelling = config.engine.spelling
    check_config(config.engine, spelling)
    for name, setting in settings_of(FrontEndSettings).items():
        try:
            setting.check(getattr(config.front_end, name))
        except ValueError as error:
            raise ConfigError(f"{spelling(name)} {error}") from error
    check_security(config.front_end, spelling)


def run(config: ServerConfig) -> int:
    """Serves until SIGTERM, SIGINT or the engine's end. Returns the exit code: 0 after a shutdown, 1 if the engine was
    lost, 2 if the service could not start (a sentence on standard error says why)."""
    try:
        check_server_config(config)
        configure_logs(config.front_end.log)
        return asyncio.run(serve(config))
    except (ConfigError, CheckpointError, EngineLostError, EngineStartError) as error:
        print(f"runahead serve: {error}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_START


async def serve(config: ServerConfig, on_ready: Callable[[int], None] | None = None) -> int:
    """`run` on a running event loop, of a checked config. on_ready: called with the port once the service answers.

    Raises ConfigError, CheckpointError, EngineStartError or EngineLostError if it can't start.
    """
    _require_free(config.front_end.host, config.front_end.port, config.engine.spelling)
    security = load_security(config.front_end, config.engine.spelling)
    tokenizer = _tokenizer(config)
    check_files(Path(config.engine.model), has_weights=config.engine.load_format != "dummy")
    stop = _stop_on_signals()
    engine = await _unless_stopped(EngineProcess.start(config.engine, config.front_end.log), stop)
    if engine is None:
        return EXIT_OK
    try:
        client = await SocketEngineClient.connect(engine.socket, counters_from=config.engine.counters_from)
        front_end = FrontEnd(client, tokenizer, config.front_end, security)
        async with _killed_if_stuck(engine, stuck_after_s(config.engine.launch_timeout_s)):
            return await _serve_engine(config, client, front_end, stop, on_ready)
    finally:
        if tokenizer is not None:
            tokenizer.close()
        exit_code = await engine.stop(config.front_end.shutdown_grace_s)
        log.info("engine_ended", exit_code=exit_code)


async def _serve_engine(
    config: ServerConfig,
    client: SocketEngineClient,
    front_end: FrontEnd,
    stop: asyncio.Event,
    on_ready: Callable[[int], None] | None,
) -> int:
    host = f"[{config.front_end.host}]" if ":" in config.front_end.host.strip("[]") else config.front_end.host
    port = await front_end.start(f"{host}:{config.front_end.port}")
    log.info("serving", host=config.front_end.host, port=port, model=client.info.model, run_ahead=client.info.run_ahead)
    if on_ready is not None:
        on_ready(port)
    lost = await _unless_stopped(client.wait_lost(), stop)
    if lost is None:
        log.info("shutting_down", open_streams=front_end.servicer.counters.open_streams)
        await front_end.stop(config.front_end.shutdown_grace_s)
        return EXIT_OK
    log.error("engine_lost", reason=lost.reason)
    front_end.engine_lost()
    await _unless_stopped(asyncio.sleep(config.linger_s), stop)
    await front_end.stop(0.0)
    # A signal to the whole process group ends the engine first: that is a shutdown, too.
    return EXIT_OK if stop.is_set() else EXIT_ENGINE_LOST


@asynccontextmanager
async def _killed_if_stuck(engine: EngineProcess, limit_s: float) -> AsyncIterator[None]:
    """While the body runs, an engine that is silent for so long is killed: whoever waits for it hears of its end.

    Raises EngineLostError if there is none.
    """

    async def kill_if_stuck() -> None:
        await watch.wait_stuck()
        log.error("engine_stuck", silent_s=limit_s)
        engine.kill()

    watch = await EngineWatch.connect(engine.socket, limit_s)
    task = asyncio.create_task(kill_if_stuck())
    try:
        yield
    finally:
        task.cancel()
        watch.close()


def _tokenizer(config: ServerConfig) -> TextTokenizer | None:
    """The checkpoint's, unless none is wanted, or random weights are served that have none beside them.

    Raises ConfigError.
    """
    folder = Path(config.engine.model)
    if config.front_end.tokenizer == "none":
        return None
    if config.engine.load_format == "dummy" and not (folder / TOKENIZER).exists():
        log.warning(
            "no_tokenizer", why=f"{folder} has no {TOKENIZER}; random weights are served without: token ids only"
        )
        return None
    return load_tokenizer(folder)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`, or None if `stop` came first: `work` is cancelled then."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    finally:
        stopped.cancel()


def _require_free(host: str, port: int, spelling: Spelling) -> None:
    """A port in use is told before the model is loaded, not after. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: old connections don't count
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"{host} port {port} can't be listened on: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"{spelling('host')} {host!r} is no host name or address") from error
