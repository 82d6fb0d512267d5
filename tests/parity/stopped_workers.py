"""Mask workers of the services that a test has started stand still until each service has held a row for want of a
mask."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import grpc

from runahead.runtime.masks.mask_worker import WORKER_MODULE
from runahead.v1 import GenerateRequest, GenerationServiceStub, StatsRequest
from tests.parity.client import Answer, run_workload
from tests.parity.services import WORKLOAD_S, run_everywhere
from tests.parity.workload import Asked

_LOOK_S: Final = 0.01


async def run_with_late_masks(urls: Mapping[str, str], asked: list[Asked]) -> dict[str, list[Answer]]:
    """A workload's answers by service. The workers stand still from its beginning until every service has held a row:
    one that has a structure and a row is held then, whatever else the machine does. Raises TimeoutError."""
    first = GenerateRequest(text="x")
    first.structure.choice.texts.append("y")
    started = await asyncio.gather(*(run_workload(url, [Asked(first)]) for url in urls.values()))
    assert all(answer.text == "y" for (answer,) in started), started
    before = [await _held(url) for url in urls.values()]
    workers = _mask_workers()
    assert len(workers) >= len(urls), "not every service has a mask worker"
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        running = asyncio.create_task(run_everywhere(urls, asked))
        async with asyncio.timeout(WORKLOAD_S):
            await asyncio.gather(*map(_wait_until_held, urls.values(), before))
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    return await running


async def _wait_until_held(url: str, before: int) -> None:
    """It is asked again and again: nothing tells of it. Whoever awaits this bounds it."""
    while await _held(url) == before:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


async def _held(url: str) -> int:
    """How often rows of the service were held so far."""
    async with grpc.aio.insecure_channel(url) as channel:
        return (await GenerationServiceStub(channel).Stats(StatsRequest())).stats.tokens.held_rows


def _mask_workers() -> list[int]:
    """Processes that this one has started, or one of those, and so on."""
    parents: dict[int, int] = {}
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if WORKER_MODULE in (process / "cmdline").read_bytes().decode().split("\0"):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return [pid for pid in found if _descends(pid, parents)]


def _descends(pid: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()
