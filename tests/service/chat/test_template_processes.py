"""Processes that render chats: bounded, replaced, renewed, and without anything of their front end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Final

import grpc
import msgspec
import pytest

from runahead.service.chat import chats as module
from runahead.service.chat.chats import Chats
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.limits import LIMITS
from tests.service.chat.rendered_chats import chat, pids, refusal, with_chats

COSTS: Final = {
    "a number without an end": "{{ 9 ** (9 ** 9) }}",
    "time": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "memory": "{{ ('x' * 10000000000) | length }}",
    "text": "{{ 'x' * 1048577 }}",
}


@pytest.mark.parametrize("template", COSTS.values(), ids=list(COSTS))
def test_a_chat_that_takes_too_much_is_refused_and_its_process_replaced(template: str) -> None:
    async def body(chats: Chats) -> None:
        await chats.text(chat(template_name="good"), 0)
        before = pids(chats)
        reason, _, sentence = await refusal(chats, chat())
        assert reason == "CHAT_COST" and sentence.startswith("chat ")
        assert await chats.text(chat(template_name="good"), 0) == "g"
        assert not set(pids(chats)) & set(before)

    with_chats({"default": template, "good": "g"}, body)
    assert ServiceError("CHAT_COST", "").code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_process_that_was_killed_is_nobodys_fault_and_another_is_started() -> None:
    async def body(chats: Chats) -> None:
        await chats.text(chat(), 0)
        (pid,) = pids(chats)
        os.kill(pid, signal.SIGSTOP)
        slow = asyncio.ensure_future(chats.text(chat(), 0))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServiceError) as lost:
            await slow
        assert (lost.value.reason, lost.value.code) == ("CHAT_LOST", grpc.StatusCode.UNAVAILABLE)
        assert await chats.text(chat(), 0) == "g"

    with_chats("g", body)


def test_a_process_that_is_stopped_is_ended_in_time_and_another_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(chats: Chats) -> None:
        await chats.text(chat(), 0)
        os.kill(pids(chats)[0], signal.SIGSTOP)
        monkeypatch.setattr(module, "_WALL", 0.01)
        assert (await refusal(chats, chat()))[0] == "CHAT_LOST"
        monkeypatch.setattr(module, "_WALL", 20)
        assert await chats.text(chat(), 0) == "g"

    with_chats("g", body)


def test_a_caller_who_leaves_ends_no_rendering_and_takes_no_turn_with_it() -> None:
    async def body(chats: Chats) -> None:
        await chats.text(chat(), 0)
        leaving = [asyncio.ensure_future(chats.text(chat(), caller)) for caller in range(6)]
        await asyncio.sleep(0)
        for one in leaving:
            one.cancel()
        await asyncio.wait(leaving)
        assert await chats.text(chat(), 9) == "g"
        assert chats.waiting == 0 and 1 <= len(pids(chats)) <= 2

    with_chats("g", body)


def test_a_process_renders_so_many_chats_and_is_renewed_and_nothing_of_one_is_seen_by_the_next() -> None:
    """Each is rendered as the first of a process would be."""

    async def body(chats: Chats) -> None:
        texts, seen = set(), set()
        for number in range(300):
            texts.add(await chats.text(chat({"role": "user", "content": str(number % 3)}), number))
            seen.update(pids(chats))
        assert texts == {"0!", "1!", "2!"}
        assert len(seen) == 2

    with_chats(
        "{% if x is defined %}leak{% endif %}{% set x = 1 %}{{ messages[0].content }}{% set n = namespace() %}"
        "{% set n.a = (n.a or '') + '!' %}{{ n.a }}",
        body,
    )


def test_a_process_has_nothing_of_the_environment_and_no_descriptor_but_its_pipes() -> None:
    async def body(chats: Chats) -> None:
        await chats.text(chat(), 0)
        (pid,) = pids(chats)
        process.append(pid)
        environment, descriptors = seen(pid)
        assert environment.startswith(b"PYTHONPATH=") and environment.count(b"\0") == 1, "that of the code alone"
        assert descriptors == ["0", "1", "2"]

    process: list[int] = []
    with_chats("g", body)
    assert process and not Path(f"/proc/{process[0]}").exists(), "it has ended with its front end"


def seen(pid: int) -> tuple[bytes, list[str]]:
    """The environment and the descriptors of a process."""
    place = Path(f"/proc/{pid}")
    return (place / "environ").read_bytes(), sorted(path.name for path in (place / "fd").iterdir())


def test_what_a_rendering_may_have_is_what_the_contract_says() -> None:
    async def body(chats: Chats) -> None:
        assert chats._orders.most_bytes == LIMITS.prompt_text_bytes
        assert msgspec.json.decode(msgspec.json.encode(chats._orders), type=type(chats._orders)) == chats._orders
        assert len(await chats.text(chat(), 0)) == LIMITS.prompt_text_bytes

    with_chats("{{ 'x' * 1048576 }}", body)
