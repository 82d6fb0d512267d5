"""The process of a front end, and of the side server: how it begins, and how its end is decided."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.processes.children import FrontEndOrders, FrontEndProcess, SideOrders
from runahead.service.servers import serve_front_end
from runahead.service.servers.serve_front_end import FrontEnd
from runahead.service.servers.supervised import listen
from runahead.service.settings.server_config import EXIT_BROKEN
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from tests.service.fake_engine import TIMEOUT_S, FakeEngine

START_S = 60.0
FROZEN = 20_000  # objects, of the libraries alone
SAYS_WHAT_IS_FROZEN = """
import gc, sys
from pathlib import Path
from runahead.service.servers import {module}

listen = {module}.{server}.{listen}

async def listening(self, *where):
    Path({told!r}).write_text(str(gc.get_freeze_count()))
    return await listen(self, *where)

{module}.{server}.{listen} = listening
sys.exit({module}.main())
"""


class EngineThatLives:
    async def wait_lost(self) -> Any:
        await asyncio.Event().wait()


class ServerThatEnds:
    """By itself, as the library's may."""

    def __init__(self) -> None:
        self.graces_s: list[float] = []

    async def wait_ended(self) -> str:
        return "UnicodeDecodeError"

    async def stop(self, grace_s: float) -> None:
        self.graces_s.append(grace_s)


def test_a_server_that_ends_by_itself_ends_its_streams_and_its_process() -> None:
    server = ServerThatEnds()

    async def until_the_end() -> int:
        return await serve_front_end._until_the_end(
            cast(FrontEndOrders, None),
            cast(SocketEngineClient, EngineThatLives()),
            cast(FrontEnd, server),
            asyncio.StreamReader(),  # nobody tells it anything
        )

    assert asyncio.run(asyncio.wait_for(until_the_end(), TIMEOUT_S)) == EXIT_BROKEN
    assert server.graces_s == [0.0]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:0"),
        ("localhost", "localhost:0"),
        ("::1", "[::1]:0"),
        ("[::1]", "[::1]:0"),
        ("::", "[::]:0"),
        ("[::]", "[::]:0"),
    ],
)
def test_a_host_is_listened_on_with_and_without_brackets(host: str, address: str) -> None:
    listened: list[str] = []

    class Listening:
        def add_insecure_port(self, address: str) -> int:
            listened.append(address)
            return 1

    assert listen(cast(grpc.aio.Server, Listening()), host, 0) == 1
    assert listened == [address]


@pytest.mark.parametrize(
    ("module", "server", "listen"), [("serve_front_end", "FrontEnd", "start"), ("side_server", "SideServer", "listen")]
)
def test_no_collection_looks_again_at_what_was_loaded_before_the_first_call(
    tmp_path: Path, module: str, server: str, listen: str
) -> None:
    told, program = tmp_path / "told", tmp_path / "program.py"
    program.write_text(SAYS_WHAT_IS_FROZEN.format(module=module, server=server, listen=listen, told=str(told)))

    async def started() -> None:
        with tempfile.TemporaryFile() as memory:
            memory.truncate(Board.size(2))
            common: dict[str, Any] = {
                "engine": EngineConfig(model=str(BUNDLED_FOLDER)),
                "settings": FrontEndSettings(log_level="error"),
                "board": memory.fileno(),
                "version": "1",
                "linger_s": 0.0,
            }
            orders = (
                FrontEndOrders(index=0, **common)
                if server == "FrontEnd"
                else SideOrders(index=1, health_port=0, metrics_port=0, **common)
            )
            async with asyncio.timeout(START_S):
                process = await FrontEndProcess.start(orders, [sys.executable, str(program)])
                try:
                    await process.serve(tmp_path / "engine", 0)
                finally:
                    await process.kill()

    engine = FakeEngine(tmp_path / "engine")
    try:
        asyncio.run(started())
    finally:
        engine.close()
    assert int(told.read_text()) > FROZEN
