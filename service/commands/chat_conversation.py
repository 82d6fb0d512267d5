"""A conversation: what was said, and the next answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from runahead.service.commands.chat_model import ChatModel, beginning
from runahead.service.commands.chat_template import Message
from runahead.service.commands.client_calls import Cancelled
from runahead.v1 import generate_pb2


class Conversation:
    """What a user and a model have said to each other. It only grows, by a message and its answer together.

    options: of every request. system: the first message, if any.
    """

    def __init__(self, model: ChatModel, options: generate_pb2.GenerateRequest, system: str | None) -> None:
        self._model = model
        self._options = options
        self._beginning = beginning(system)
        self._said: list[Message] = []

    def reset(self) -> None:
        """Forgets what was said. The system prompt stays."""
        self._said = []

    def ask(self, text: str, show: Callable[[str], None]) -> generate_pb2.Finished:
        """Shows the answer as it arrives; returns how it ended.

        Raises ChatError and grpc.RpcError: then the message is no part of the conversation. Raises Cancelled: then it
        is, with the part of the answer that was shown, if any was.
        """
        messages: list[Message] = [*self._said, {"role": "user", "content": text}]
        request = self._model.request(self._options, [*self._beginning, *messages])
        parts: list[str] = []
        finished = generate_pb2.Finished()
        try:
            with contextlib.closing(self._model.calls.generate(request)) as responses:
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


def _answer(parts: list[str]) -> Message:
    return {"role": "assistant", "content": "".join(parts)}
