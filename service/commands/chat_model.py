"""The served model as a chat needs it: what makes token ids of messages, and what ends an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from runahead.runtime.log_output import printable
from runahead.service.commands.chat_template import ChatError, ChatTemplate, Message
from runahead.service.commands.client_calls import ClientCalls
from runahead.service.commands.request_flags import with_chat_defaults
from runahead.v1 import generate_pb2, model_pb2


class ContextFull(ChatError):
    """A conversation has grown larger than what the model can be given."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A context manager: at its end the template's process is gone."""

    info: model_pb2.GetModelInfoResponse
    template: ChatTemplate
    calls: ClientCalls

    @classmethod
    def ask(cls, calls: ClientCalls) -> ChatModel:
        """What the server serves. Raises ChatError where that is not for chats, and what calls raise."""
        info = calls.model_info()
        if not info.has_tokenizer:
            raise ChatError("the server has no tokenizer (--tokenizer none), and a chat is text")
        if not info.chat_template:
            raise ChatError(
                f"the served model {printable(info.model)} has no chat template: it can only continue a text, with "
                "`runahead generate TEXT`; a chat needs an instruct model, whose checkpoint brings one"
            )
        return cls(info, ChatTemplate(info.chat_template, dict(info.template_tokens)), calls)

    def __enter__(self) -> ChatModel:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.template.__exit__()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages and of the beginning of an answer to them.

        Raises ContextFull, ChatError for messages that the template refuses, and what calls raise.
        """
        text = self.template.render(messages)
        if not text:
            raise ChatError("the model's chat template makes no text of these messages")
        most_bytes, most_tokens = self.info.limits.prompt_text_bytes, self.info.limits.prompt_tokens
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise ChatError("the model's chat template writes something that is no text") from None
        if size > most_bytes:
            raise _too_long(f"{size} bytes", f"{most_bytes} bytes of text")
        ids = self.calls.tokens_of(text)
        if len(ids) > most_tokens:
            raise _too_long(f"{len(ids)} tokens", f"a prompt of {most_tokens} tokens in its context")
        return ids

    def request(self, options: generate_pb2.GenerateRequest, ids: Sequence[int]) -> generate_pb2.GenerateRequest:
        """The options with these ids as prompt, what ends an answer, and a chat's own defaults for what is unset."""
        request = with_chat_defaults(options)
        request.token_ids.ids[:] = ids
        if not options.stopping.ignore_eos:
            given = set(options.stopping.stop_token_ids)
            request.stopping.stop_token_ids.extend(end for end in self._ends() if end not in given)
        return request

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
