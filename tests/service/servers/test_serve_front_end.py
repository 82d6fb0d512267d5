"""The end of a front end's process, as it is decided."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.processes.front_end_process import FrontEndOrders
from runahead.service.servers import serve_front_end
from runahead.service.servers.front_end import FrontEnd
from runahead.service.servers.listening import listen
from runahead.service.settings.server_config import EXIT_SERVER_ENDED
from tests.service.fake_engine import TIMEOUT_S


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

    assert asyncio.run(asyncio.wait_for(until_the_end(), TIMEOUT_S)) == EXIT_SERVER_ENDED
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
