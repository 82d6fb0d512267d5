"""`runahead serve`: runs the service and returns its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import structlog

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.log.logs import configure_logs
from runahead.service.processes.children import EngineStartError, FrontEndStartError
from runahead.service.processes.ports import Ports
from runahead.service.processes.supervisor import supervise
from runahead.service.settings.server_config import EXIT_CANNOT_START, ServerConfig, check_server_config
from runahead.service.version import full_version

log = structlog.get_logger(__name__)


def run(config: ServerConfig) -> int:
    """Serve until SIGTERM, SIGINT or the engine's end. Returns 0 after a shutdown; 1 if the engine was lost, no front
    end could be kept, a shutdown was forced or the supervisor failed; 2 if the service could not start (a sentence on
    standard error says why).
    """
    try:
        check_server_config(config)
        configure_logs(config.front_end.log)
        engine = config.engine
        with contextlib.closing(Ports.reserve(config.front_end, engine.spelling)) as ports:
            log.info("starting", model=engine.served_name, device=engine.device, version=full_version())
            return asyncio.run(supervise(config, ports))
    except FrontEndStartError as error:
        if error.exit_code != EXIT_CANNOT_START:  # a process with that code has written its reason
            print(f"runahead serve: {error}", file=sys.stderr, flush=True)
    except (ConfigError, CheckpointError, EngineLostError, EngineStartError) as error:
        print(f"runahead serve: {error}", file=sys.stderr, flush=True)
    except OSError as error:  # such as too many open files
        print(f"runahead serve: the system refuses what the service needs: {error}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_START
