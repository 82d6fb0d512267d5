"""Readers of KV cache events: how an error of the feed ends them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.kv_events import feed
from runahead.service.kv_events.feed import KvReaders


class BrokenFeed:
    def __init__(self, *parts: Any) -> None:
        pass

    async def run(self) -> None:
        raise KeyError("secret")


def test_an_error_of_the_feed_is_logged_and_is_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KvFeed", BrokenFeed)

    async def read() -> None:
        await KvReaders(cast(SocketEngineClient, None)).behind(0, None)

    with capture_logs() as events, pytest.raises(EngineLostError) as lost:
        asyncio.run(read())
    assert lost.value.reason == "PROTOCOL"
    assert [(event["event"], event["why"]) for event in events] == [("kv_events_ended", "KeyError")]
