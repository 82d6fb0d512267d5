"""A conversation with the served model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from runahead.runtime.log_output import printable
from runahead.service.commands.client import Cancelled, ClientCalls
from runahead.service.commands.request_flags import with_chat_defaults
from runahead.v1 import generate_pb2, model_pb2


def why_no_chat(info: model_pb2.GetModelInfoResponse) -> str:
    """Return why the server takes no chats, as a sentence without a period; empty if it does."""
    if info.chat:
        return ""
    if not info.has_tokenizer:
        return "the server has no tokenizer (--tokenizer none), and a chat is text"
    if info.chat_template:
        return (
            "the server does not render chats: it needs the package jinja2, 3.1.6 or newer; install it there with "
            "`pip install 'runahead-server[chat]'`"
        )
    return (
        f"the served model {printable(info.model)} has no chat template: it can only continue a text, with "
        "`runahead generate TEXT`; a chat needs an instruct model, whose checkpoint brings one"
    )


def chat_request(
    options: generate_pb2.GenerateRequest, messages: Iterable[generate_pb2.ChatMessage]
) -> generate_pb2.GenerateRequest:
    """Return the options with these messages as prompt and a chat's defaults."""
    request = with_chat_defaults(options)
    request.chat.messages.extend(messages)
    return request


def system_messages(system: str | None) -> list[generate_pb2.ChatMessage]:
    """Return the system prompt as a chat's first message, if any."""
    return [] if system is None else [generate_pb2.ChatMessage(role="system", content=system)]


class Conversation:
    """The messages of a user and the model's answers. Grows by one message and its answer together.

    options: of every request. system: the first message, if any.
    """

    def __init__(self, calls: ClientCalls, options: generate_pb2.GenerateRequest, system: str | None) -> None:
        self._calls = calls
        self._options = options
        self._system = system_messages(system)
        self._said: list[generate_pb2.ChatMessage] = []

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self._said = []

    def ask(self, text: str, show: Callable[[str], None]) -> generate_pb2.Finished:
        """Show the answer as it arrives and return its end.

        Raises grpc.RpcError and does not keep the message. Raises Cancelled and keeps the message with the shown part
        of the answer, if any.
        """
        messages = [*self._said, generate_pb2.ChatMessage(role="user", content=text)]
        request = chat_request(self._options, [*self._system, *messages])
        parts: list[str] = []
        finished = generate_pb2.Finished()
        try:
            with contextlib.closing(self._calls.generate(request)) as responses:
                for response in responses:
                    if response.HasField("delta") and response.delta.text:
                        parts.append(response.delta.text)
                        show(response.delta.text)
                    elif response.HasField("finished"):
                        finished = response.finished
        except Cancelled:
            if parts:
                self._said = [*messages, _answer(parts)]
            raise
        self._said = [*messages, _answer(parts)]
        return finished


def _answer(parts: list[str]) -> generate_pb2.ChatMessage:
    return generate_pb2.ChatMessage(role="assistant", content="".join(parts))
