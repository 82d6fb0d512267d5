"""The chats of one front end: renders them, and finds the tokens that end an answer."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from typing import Final

import structlog

from runahead.runtime.wire.messages import EngineInfo
from runahead.service.chat.template_messages import RENDER_S, TEMPLATE_MODULE, Asked, Rendered, Templates
from runahead.service.contract.errors import ServiceError, Violation, invalid_argument, no_chat_template, no_tokenizer
from runahead.service.contract.inputs import CheckedChat
from runahead.service.contract.limits import LIMITS
from runahead.service.text.tokenizer import TextTokenizer
from runahead.service.workers.caller_turns import Turns
from runahead.service.workers.worker_process import UnusableError, WorkerLostError, WorkerProcess

_LEAST: Final = (3, 1, 6)  # earlier versions have known ways out of the sandbox
_INSTALL: Final = "pip install 'runahead-server[chat]'"

log = structlog.get_logger(__name__)

_WORKERS: Final = 2
_WALL: Final = 20  # wall time for a rendering on a busy machine, in multiples of its processor time
_ANSWER: Final = "an answer of the assistant"
_NOBODY: Final = -1  # instead of a caller's number


class Chats:
    """Renders chats in worker processes, started on demand. Use it on one event loop and close it.

    tokenizer: None if the service has none. info: the engine's.
    """

    def __init__(self, tokenizer: TextTokenizer | None, info: EngineInfo) -> None:
        templates = {} if tokenizer is None else tokenizer.chat_templates
        self._tokenizer = tokenizer
        self._eos_token_ids = info.eos_token_ids
        self._refusal = _why_none(templates) if tokenizer is not None else ""
        special = {} if tokenizer is None else tokenizer.special_tokens
        self._ids = {content: token_id for token_id, content in special.items()}
        self._tokens = {} if tokenizer is None else tokenizer.template_tokens
        self._orders = Templates(templates, self._tokens, list(self._ids), LIMITS.prompt_text_bytes)
        self._turns = Turns(_WORKERS)
        self._workers = [self._new_worker() for _ in range(_WORKERS)]
        self._idle = list(self._workers)  # the most recently used one last
        self._ends: tuple[int, ...] | None = None

    @property
    def are_served(self) -> bool:
        """Whether requests may have a chat."""
        return self._tokenizer is not None and not self._refusal

    @property
    def waiting(self) -> int:
        """The number of chats that wait for a worker."""
        return self._turns.waiting

    def require(self) -> None:
        """Check that chats are served. Raises ServiceError (FAILED_PRECONDITION)."""
        if self._tokenizer is None:
            raise no_tokenizer()
        if self._refusal:
            raise no_chat_template(self._refusal)

    async def text(self, chat: CheckedChat, caller: int, letter: str = "") -> str:
        """Render a chat to a prompt with the model's template. caller: callers take turns. letter: see `Asked`.

        Raises ServiceError: the errors of `require`, INVALID_ARGUMENT with the field's path, FAILED_PRECONDITION for an
        invalid template, RESOURCE_EXHAUSTED for a chat that takes too much, UNAVAILABLE if its process was lost.
        """
        self.require()
        asked = Asked(**asdict(chat), now=datetime.now().isoformat(), letter=letter)
        answer = await self._turns.do(caller, lambda: self._rendered(asked))
        if answer.fault == "template":
            raise no_chat_template(f"the model's is not a Jinja template: {answer.sentence}")
        if answer.fault:
            field = f"chat.{answer.field}" if answer.field else "chat"
            sentence = f"{field} {answer.sentence}"
            if answer.fault == "cost":
                raise ServiceError("CHAT_COST", sentence)
            raise invalid_argument([Violation(field, sentence)])
        return answer.text

    async def end_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end an answer: the template's, the tokenizer's end of sequence and the model's. Empty
        if chats are not served.
        """
        if not self.are_served:
            return ()
        if self._ends is None:
            try:
                turn_end = await self._turn_end()
            except ServiceError as error:
                if error.reason == "CHAT_LOST":
                    return self._all_ends("")  # a lost process: the template's end is unknown this time
                log.warning("chat_end_unknown", reason=error.reason, why=error.sentence)
                turn_end = ""
            self._ends = self._all_ends(turn_end)
        return self._ends

    async def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            await worker.close()

    def _new_worker(self) -> WorkerProcess:
        # The environment has only the import path.
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        return WorkerProcess(TEMPLATE_MODULE, self._orders, "chat", "renders chats", environment)

    async def _turn_end(self) -> str:
        """Find the special token that the template writes after an answer, empty if none."""
        messages = ({"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER})
        text = await self.text(CheckedChat(messages, "", "", False, False, "", False), _NOBODY)
        behind = text.rpartition(_ANSWER)[2].lstrip()
        return max((content for content in self._ids if content and behind.startswith(content)), key=len, default="")

    def _all_ends(self, turn_end: str) -> tuple[int, ...]:
        named = [self._ids[text] for text in (turn_end, self._tokens.get("eos_token", "")) if text in self._ids]
        return tuple(dict.fromkeys([*named, *self._eos_token_ids]))

    async def _rendered(self, asked: Asked) -> Rendered:
        """Render in an idle worker."""
        worker = self._idle.pop()
        try:
            answer = await worker.ask(asked, Rendered, _WALL * RENDER_S)
            if isinstance(answer, int):
                return _of_a_process_that_ended(answer)
            if answer.is_last:
                await worker.end()
            return answer
        except (UnusableError, WorkerLostError) as error:
            raise _lost(str(error)) from None
        except TimeoutError:
            raise _lost("a chat was not rendered in time") from None
        finally:
            self._idle.append(worker)


def _of_a_process_that_ended(code: int) -> Rendered:
    """Return the fault of a chat that ended its process. Raises ServiceError if the chat did not cause the end."""
    if code == -signal.SIGPROF:
        return Rendered(fault="cost", sentence=f"takes more than {RENDER_S:g} s of processor time to be rendered")
    if code in (-signal.SIGABRT, -signal.SIGSEGV):  # libraries abort when memory is refused
        return Rendered(fault="cost", sentence="needs more memory to be rendered than a chat may take")
    raise _lost("the process that rendered the request's chat was ended")


def _why_none(templates: Mapping[str, str]) -> str:
    """Say why chats are not served, as a sentence without a period. Empty if they are."""
    if not templates:
        return "the model has no chat template, and none was given with --chat-template"
    return why_no_jinja2()


def _lost(sentence: str) -> ServiceError:
    return ServiceError("CHAT_LOST", f"{sentence}; the request may be sent again")


def why_no_jinja2() -> str:
    """Say why templates can't be rendered and how to fix it, as a sentence without a period. Empty if they can."""
    least = ".".join(map(str, _LEAST))
    try:
        found = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        return f"the package jinja2, which renders chat templates, is not installed: {_INSTALL}"
    if tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < _LEAST:
        return f"chat templates need jinja2 {least} or newer, and {found} is installed: {_INSTALL}"
    return ""
