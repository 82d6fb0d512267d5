"""A checkpoint's chat template, rendered on the client's side where the server does not: by a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final

import msgspec

from runahead.runtime.log_output import printable
from runahead.service.chat.jinja2_package import why_no_jinja2
from runahead.service.chat.template_messages import TEMPLATE_MODULE, Asked, Rendered, Templates

_COMMAND: Final = (sys.executable, "-P", "-X", "utf8", "-m", TEMPLATE_MODULE)
# Its bound on processor time, three seconds, ends a template that computes; this one what else may keep the process.
_WALL_S: Final = 60.0
_MOST_BYTES: Final = 32 << 20  # of its answers, whatever the process has become
_MOST_RENDERED: Final = 4 << 20  # bytes of a rendered text: four times what any server takes

Message = Mapping[str, str]  # its role and its content


class ChatError(Exception):
    """There can be no chat, or not with these messages. One sentence that says why, and what to do."""


class ChatTemplate:
    """What makes a prompt of messages. A context manager: at its end the process is gone.

    template: as the checkpoint has it. tokens: special tokens by the names under which it asks for them.
    """

    def __init__(self, template: str, tokens: Mapping[str, str]) -> None:
        """Raises ChatError where jinja2 is missing or too old."""
        if why := why_no_jinja2():
            raise ChatError(f"there can be no chat: {why}")
        self._orders = Templates({"default": template}, dict(tokens), (), _MOST_RENDERED)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process is not None:
            self._end(self._process)

    def start(self) -> None:
        """Starts the process that renders the next prompt, while somebody still thinks about it. Idempotent."""
        if self._process is None:
            # A session of its own: Ctrl-C on the terminal is not for it.
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={"PYTHONPATH": os.pathsep.join(sys.path)},  # the template is a stranger's
            )

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the next answer. Raises ChatError."""
        self.start()
        process = self._process
        assert process is not None
        timer = threading.Timer(_WALL_S, process.kill)
        timer.start()
        try:
            asked = Asked(messages, datetime.now().isoformat())
            answer = _ask(process, self._orders, asked)
        finally:
            timer.cancel()
            self._end(process)
        if answer is None:
            reason = f"the chat {_how_it_ended(process.returncode)}"
        elif answer.fault:
            reason = _line(f"{answer.field or 'the chat'} {answer.sentence}")
        else:
            return answer.text
        raise ChatError(f"{reason}; `runahead generate` without --chat does without the chat template")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what it was not told any more
                if pipe is not None:
                    pipe.close()
        process.wait()


def _ask(process: subprocess.Popen[bytes], orders: Templates, asked: Asked) -> Rendered | None:
    """What the process answers; None where it ended without an answer."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"".join(msgspec.json.encode(said) + b"\n" for said in (orders, asked)))
        process.stdin.close()
    answers = process.stdout.read(_MOST_BYTES)
    if len(answers) == _MOST_BYTES:
        return None
    process.wait()
    _, _, answer = answers.partition(b"\n")
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer, type=Rendered)
    return None


def _how_it_ended(code: int | None) -> str:
    if code in (-signal.SIGPROF, -signal.SIGKILL):
        return "takes longer to be rendered than a chat may"
    return f"is not rendered: the process that does it ended with exit code {code}"


def _line(words: object) -> str:
    """Words of a template on one line, of a length that can be read, and without what a terminal would act on."""
    text = printable(" ".join(str(words).split()))
    return text if len(text) <= 300 else text[:300] + "…"
