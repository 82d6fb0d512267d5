"""The flags of `runahead generate` and `runahead chat`.

They are made from the fields of `GenerateRequest`; a field without a flag stays unset.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from runahead.runtime.wire.setting import shown
from runahead.service.commands.ends import UsageError as UsageError
from runahead.service.settings.bounded_files import FileError, read_text
from runahead.v1 import Choice, Structure, generate_pb2

_MOST_BYTES: Final = 16 << 20  # of a file
_FLAGS: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "ebnf")

MOST_CHARACTERS: Final = 64 << 20  # characters read from standard input
_GROUPS: Final = ("sampling", "stopping", "output")
_MAX_TIMEOUT_S: Final = 31_536_000.0  # a year; a later deadline would wrap into the past
_HELP: Final = {
    "request_id": "name of the request, for Abort (default: the server's choice)",
    "cache_salt": "share cached prefixes only with requests of the same salt",
    "n": "completions of the prompt, each printed when it has ended; their seeds count up from the first one's",
    "priority": "higher is admitted first, of one caller's",
    "add_special_tokens": "put the tokenizer's special tokens around the prompt, if it is text (default)",
    "temperature": "0 is greedy",
    "top_k": "draw from the k most likely tokens; 0 is off",
    "top_p": "draw from the most likely tokens that reach this sum; 1 is off",
    "min_p": "leave out tokens less likely than this share of the most likely",
    "seed": "of the draw (default: the server's choice, printed at the end)",
    "repetition_penalty": "on tokens seen before; 1 is off",
    "presence_penalty": "on tokens generated before; 0 is off",
    "frequency_penalty": "on tokens generated before, for each time; 0 is off",
    "logit_bias": "added to logits, as ID=VALUE,ID=VALUE",
    "allowed_token_ids": "only these can be drawn, as ID,ID",
    "max_tokens": "at most this many tokens",
    "min_tokens": "no end of sequence before this many tokens",
    "stop": "end where the text contains this; may be repeated",
    "stop_token_ids": "end with any of these tokens, as ID,ID",
    "ignore_eos": "go on past the end of sequence",
    "include_stop": "keep the stop string in the text",
    "logprobs": "ask for log-probabilities, of the n most likely too; printed with the tokens on standard error",
    "prompt_logprobs": "the same for the prompt",
    "echo": "have the prompt's tokens sent back; their text is printed before the completion's",
    "max_tokens_per_message": "tokens in one message",
}
_ON_BY_DEFAULT: Final = ("add_special_tokens",)
_TOKEN_IDS: Final = "whole numbers from 0 to 4294967295, as ID,ID"
_TEXT: Final = "text in UTF-8"
_VALUES: Final = {  # a value of each type, at the end of a sentence
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_INT32: "a whole number from -2147483648 to 2147483647",
    FieldDescriptor.TYPE_UINT32: "a whole number from 0 to 4294967295",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 18446744073709551615",
    FieldDescriptor.TYPE_STRING: _TEXT,
}


def add_structure_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each kind of structure."""
    parser.add_argument(
        "--json-schema", metavar="FILE", help="a text of JSON that is valid by the JSON Schema in a file"
    )
    parser.add_argument("--json-object", action="store_true", default=None, help="an object of JSON, whatever is in it")
    parser.add_argument("--regex", metavar="TEXT", help="a text that all of this regular expression matches")
    parser.add_argument("--choice", action="append", metavar="TEXT", help="one of several texts; may be repeated")
    parser.add_argument("--grammar", metavar="FILE", help="a text of the grammar in a file, in the words of Lark")
    parser.add_argument("--ebnf", metavar="FILE", help="a text of the grammar in a file, in EBNF (GBNF)")


def structure_of(arguments: argparse.Namespace) -> Structure | None:
    """Return the flags' structure, None without one. Raises ValueError that names the flag."""
    given = {name: value for name in _FLAGS if (value := getattr(arguments, name, None)) is not None}
    if not given:
        return None
    if len(given) > 1:
        flags = " and ".join(map(_flag, given))
        raise ValueError(f"{flags} can't be given together: a completion has one structure")
    ((name, value),) = given.items()
    if name in ("json_schema", "grammar", "ebnf"):
        value = _read(name, value)
    try:
        structure = Structure(choice=Choice(texts=value) if name == "choice" else None)
        if name != "choice":
            setattr(structure, name, value)
        return structure
    except ValueError as error:  # an invalid character
        raise ValueError(f"{_flag(name)} must be text in UTF-8, and is {shown(value)}") from error


def _read(name: str, path: str) -> str:
    try:
        return read_text(path, _MOST_BYTES)
    except FileError as error:
        raise ValueError(f"{_flag(name)} must be a file that can be read, and is {shown(path)}: {error}") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the prompt and one flag for each field of the request."""
    parser.add_argument("prompt", nargs="?", help="text to continue (default, and for '-': standard input)")
    parser.add_argument("--timeout", metavar="SECONDS", help="give up after this long")
    parser.add_argument("--token-ids", metavar="ID,ID", help="the prompt as token ids, in place of text")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a message to an instruct model, in its chat template; the temperature is 0, and an answer "
        "has at most 1024 tokens, unless flags say otherwise",
    )
    add_system_flag(parser)
    add_field_flags(parser)


def add_system_flag(parser: argparse.ArgumentParser) -> None:
    """Add the system prompt's flag."""
    parser.add_argument(
        "--system", metavar="TEXT", help="system prompt of a chat (default: the template's own, if any)"
    )


def add_field_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add one flag for each field of the request except its prompt. without: fields and groups to leave out."""
    if "structure" not in without:
        add_structure_flags(parser)
    for field, group in _fields():
        if field.name in without or group in without:
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.name in _ON_BY_DEFAULT:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=_HELP[field.name])
        elif field.type == FieldDescriptor.TYPE_BOOL:
            parser.add_argument(flag, action="store_true", default=None, help=_HELP[field.name])
        elif _is_text_list(field):
            parser.add_argument(flag, action="append", metavar="TEXT", help=_HELP[field.name])
        else:
            parser.add_argument(flag, metavar="VALUE", help=_HELP[field.name])


def build_request(arguments: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """Make the request from the flags, with standard input as default prompt. Raises UsageError."""
    request = build_options(arguments)
    if system_of(arguments) is not None and not arguments.chat:
        raise UsageError("--system is for --chat: without it the prompt is all that the model is given")
    if arguments.chat and request.add_special_tokens:
        raise UsageError("--chat takes no --add-special-tokens: the model's chat template writes its own")
    if arguments.token_ids is not None:
        if arguments.chat:
            raise UsageError("--chat takes a message as text, and no --token-ids")
        if arguments.prompt is not None:
            raise UsageError("a prompt and --token-ids can't be given together")
        try:
            request.token_ids.ids.extend(_integers(arguments.token_ids))
        except ValueError as error:
            raise UsageError.of("token_ids", _TOKEN_IDS, arguments.token_ids) from error
        request.token_ids.SetInParent()
    else:
        try:
            request.text = _read_prompt(arguments.prompt)
        except UnicodeError as error:  # not UTF-8, or an invalid character
            raise UsageError("the prompt is not UTF-8") from error
    return request


def build_options(arguments: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """Make the request from the flags, without a prompt. Raises UsageError."""
    request = generate_pb2.GenerateRequest()
    for field, group in _fields():
        given = getattr(arguments, field.name, None)
        if given is None:
            continue
        try:
            _set(getattr(request, group) if group else request, field, given)
        except (ValueError, TypeError) as error:
            raise UsageError.of(field.name, _accepts(field), given) from error
    try:
        request.MergeFrom(generate_pb2.GenerateRequest(structure=structure_of(arguments)))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return request


def chat_request(
    options: generate_pb2.GenerateRequest, messages: Iterable[generate_pb2.ChatMessage]
) -> generate_pb2.GenerateRequest:
    """Return the options with these messages as prompt and a chat's defaults, which the help texts name.

    A small model drifts at temperature 1, and may repeat itself endlessly with greedy sampling.
    """
    request = generate_pb2.GenerateRequest(
        sampling=generate_pb2.SamplingOptions(temperature=0.0), stopping=generate_pb2.StoppingOptions(max_tokens=1024)
    )
    request.MergeFrom(options)
    request.chat.messages.extend(messages)
    return request


def system_messages(system: str | None) -> list[generate_pb2.ChatMessage]:
    """Return the system prompt as a chat's first message, if any."""
    return [] if system is None else [generate_pb2.ChatMessage(role="system", content=system)]


def is_greedy(request: generate_pb2.GenerateRequest) -> bool:
    """Whether no token is drawn, so that the seed has no effect."""
    return request.sampling.HasField("temperature") and request.sampling.temperature == 0


def system_of(arguments: argparse.Namespace) -> str | None:
    """Return the system prompt. Raises UsageError."""
    given: str | None = arguments.system
    try:
        if given is not None:
            given.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError.of("system", _TEXT, given) from error
    return given


def seconds_of(text: str, flag: str = "timeout") -> float:
    """Parse a flag's seconds. Raises UsageError."""
    try:
        if 0 < (seconds := float(text)) <= _MAX_TIMEOUT_S:
            return seconds
    except ValueError:
        pass
    raise UsageError.of(flag, f"a number of seconds above 0, at most {_MAX_TIMEOUT_S:.0f}", text)


def _fields() -> Iterator[tuple[Any, str]]:
    """Yield descriptors of the fields with flags, each with its message's name ('': the request itself)."""
    descriptor: Any = generate_pb2.GenerateRequest.DESCRIPTOR  # its class depends on protobuf's implementation
    for field in descriptor.fields:
        if field.name in _GROUPS:
            for inner in field.message_type.fields:
                yield inner, field.name
        elif field.name != "structure" and getattr(field.containing_oneof, "name", "") != "prompt":
            yield field, ""


def _set(message: Any, field: Any, given: Any) -> None:
    """Set a field from text. Raises ValueError or TypeError for an invalid value."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:  # logit_bias, the only map
        for entry in given.split(","):
            token, _, value = entry.partition("=")
            getattr(message, field.name)[int(token)] = float(value)
    elif _is_text_list(field):
        getattr(message, field.name).extend(given)
    elif field.is_repeated:
        getattr(message, field.name).extend(_integers(given))
    else:
        convert = {FieldDescriptor.TYPE_FLOAT: float, FieldDescriptor.TYPE_BOOL: bool, FieldDescriptor.TYPE_STRING: str}
        setattr(message, field.name, convert.get(field.type, int)(given))


def _accepts(field: Any) -> str:
    """Say what a flag accepts, as the end of a sentence."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return "whole numbers from 0 to 4294967295, each with a number, as ID=VALUE,ID=VALUE"
    if field.is_repeated and not _is_text_list(field):
        return _TOKEN_IDS
    return _VALUES[field.type]


def _is_text_list(field: Any) -> bool:
    return bool(field.is_repeated) and field.type == FieldDescriptor.TYPE_STRING


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _read_prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if sys.stdin.isatty():
        raise UsageError("there is no prompt; give one as an argument or on standard input")
    text = sys.stdin.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"the prompt on standard input has more than {MOST_CHARACTERS} characters")
    return text
