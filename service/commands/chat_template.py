"""A checkpoint's chat template, rendered for a client: by a process of its own, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import TracebackType
from typing import Any, Final

from runahead.runtime.log_output import printable

TEMPLATE_MODULE: Final = "runahead.service.commands.template_process"
_COMMAND: Final = (sys.executable, "-P", "-X", "utf8", "-m", TEMPLATE_MODULE)
# Its bound on processor time, three seconds, ends a template that computes; this one what else may keep the process.
_WALL_S: Final = 60.0
_MOST_BYTES: Final = 32 << 20  # of its answer, whatever the process has become
_LEAST_JINJA2: Final = (3, 1, 6)  # those before have known ways out of the sandbox
_INSTALL: Final = "pip install 'runahead-server[chat]'"

Message = Mapping[str, str]  # its role and its content


class ChatError(Exception):
    """There can be no chat, or not with these messages. One sentence that says why, and what to do."""


class ChatTemplate:
    """What makes a prompt of messages. A context manager: at its end the process is gone.

    template: as the checkpoint has it. tokens: special tokens by the names under which it asks for them.
    """

    def __init__(self, template: str, tokens: Mapping[str, str]) -> None:
        """Raises ChatError where jinja2 is missing or too old."""
        _check_jinja2()
        self._template = template
        self._tokens = dict(tokens)
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
            )

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the next answer. Raises ChatError."""
        self.start()
        process = self._process
        assert process is not None
        timer = threading.Timer(_WALL_S, process.kill)
        timer.start()
        try:
            answer = _ask(process, {"template": self._template, "messages": messages, "tokens": self._tokens})
        finally:
            timer.cancel()
            self._end(process)
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise ChatError(f"the model's chat template refuses these messages: {_line(answer['refused'])}")
        reason = _line(answer["failed"]) if "failed" in answer else _how_it_ended(process.returncode)
        raise ChatError(
            f"the model's chat template can't be rendered: {reason}; `runahead generate` without --chat does without it"
        )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what it was not told any more
                if pipe is not None:
                    pipe.close()
        process.wait()


def _ask(process: subprocess.Popen[bytes], asked: dict[str, Any]) -> dict[str, Any]:
    """What the process answers; nothing where it ended without an answer."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asked).encode())
        process.stdin.close()
    answer = process.stdout.read(_MOST_BYTES + 1)
    if len(answer) > _MOST_BYTES:
        return {"failed": f"the prompt takes more than {_MOST_BYTES >> 20} MiB"}
    process.wait()
    try:
        decoded = json.loads(answer)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _how_it_ended(code: int | None) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "it takes longer than a template may"
    return f"the process that renders it ended with exit code {code}"


def _line(words: object) -> str:
    """Words of a template on one line, of a length that can be read, and without what a terminal would act on."""
    text = printable(" ".join(str(words).split()))
    return text if len(text) <= 300 else text[:300] + "…"


def _check_jinja2() -> None:
    try:
        found = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        raise ChatError(f"a chat needs the package jinja2, which renders the model's template: {_INSTALL}") from None
    if tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < _LEAST_JINJA2:
        least = ".".join(map(str, _LEAST_JINJA2))
        raise ChatError(f"a chat needs jinja2 {least} or newer, and here is {found}: {_INSTALL}")
