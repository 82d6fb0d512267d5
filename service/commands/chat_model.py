"""The served model as a chat needs it: how messages become a request. A server that renders chats gets the messages;
for an older one, or one without jinja2, they are rendered here, and it gets token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from runahead.runtime.log_output import printable
from runahead.service.commands.chat_template import ChatError, ChatTemplate, Message
from runahead.service.commands.client_calls import ClientCalls
from runahead.service.commands.request_flags import with_chat_defaults
from runahead.v1 import generate_pb2, model_pb2

Request = generate_pb2.GenerateRequest


class ContextFull(ChatError):
    """A conversation has grown larger than what the model can be given."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A context manager: at its end the template's process is gone. template: None where the server renders chats."""

    info: model_pb2.GetModelInfoResponse
    template: ChatTemplate | None
    calls: ClientCalls

    @classmethod
    def ask(cls, calls: ClientCalls) -> ChatModel:
        """What the server serves. Raises ChatError where that is not for chats, and what calls raise."""
        info = calls.model_info()
        if not info.has_tokenizer:
            raise ChatError("the server has no tokenizer (--tokenizer none), and a chat is text")
        if info.chat:
            return cls(info, None, calls)
        if not info.chat_template:
            raise ChatError(
                f"the served model {printable(info.model)} has no chat template: it can only continue a text, with "
                "`runahead generate TEXT`; a chat needs an instruct model, whose checkpoint brings one"
            )
        return cls(info, ChatTemplate(info.chat_template, dict(info.template_tokens)), calls)

    def __enter__(self) -> ChatModel:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.template is not None:
            self.template.__exit__()

    def prepare(self) -> None:
        """Gets ready for the next message, while somebody still thinks about it."""
        if self.template is not None:
            self.template.start()

    def request(self, options: generate_pb2.GenerateRequest, messages: Sequence[Message]) -> Request:
        """The options with these messages as prompt, what ends an answer, and a chat's own defaults for what is unset.

        Raises, where the server does not render chats: ContextFull, ChatError for messages that the template refuses,
        and what calls raise.
        """
        request = with_chat_defaults(options)
        if self.template is None:
            request.chat.messages.extend(generate_pb2.ChatMessage(**message) for message in messages)
            return request
        request.token_ids.ids[:] = self._prompt(self.template.render(messages))
        if not options.stopping.ignore_eos:
            given = set(options.stopping.stop_token_ids)
            request.stopping.stop_token_ids.extend(end for end in self._ends() if end not in given)
        return request

    def _prompt(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        most_bytes, most_tokens = self.info.limits.prompt_text_bytes, self.info.limits.prompt_tokens
        size = len(text.encode())
        if size > most_bytes:
            raise _too_long(f"{size} bytes", f"{most_bytes} bytes of text")
        ids = self.calls.tokens_of(text)
        if len(ids) > most_tokens:
            raise _too_long(f"{len(ids)} tokens", f"a prompt of {most_tokens} tokens in its context")
        return ids

    def _ends(self) -> list[int]:
        """The token that ends an answer by the tokenizer's configuration, where the server does not end at it anyway: a
        model's own may name another, which ends a document."""
        written = {special.content: special.id for special in self.info.special_tokens}
        end = written.get(self.info.template_tokens.get("eos_token", ""))
        return [] if end is None or end in self.info.eos_token_ids else [end]


def beginning(system: str | None) -> list[Message]:
    """What stands before all that is said: the system prompt, if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def _too_long(size: str, most: str) -> ContextFull:
    return ContextFull(
        f"with this message the conversation takes {size}, and the model takes {most}: nothing is cut, and the message "
        "is not sent; a shorter one may fit"
    )
