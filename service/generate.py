"""`runahead generate`: sends one prompt to a server and prints the text as it arrives.

The flags are the fields of `GenerateRequest`, read from the contract itself; a field that is not given stays unset.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

_GROUPS: Final = ("sampling", "stopping", "output")
_HELP: Final = {
    "request_id": "name of the request, for Abort (default: the server's choice)",
    "cache_salt": "share cached prefixes only with requests of the same salt",
    "priority": "higher is admitted first",
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


class UsageError(ValueError):
    """A flag that can't be. One sentence that names it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The prompt, the address, and one flag for each field of the request."""
    parser.add_argument("prompt", nargs="?", help="text to continue (default, and for '-': standard input)")
    parser.add_argument("--url", default="127.0.0.1:50051", metavar="HOST:PORT", help="the server (%(default)s)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--token-ids", metavar="ID,ID", help="the prompt as token ids, in place of text")
    for field, _group in _fields():
        flag = "--" + field.name.replace("_", "-")
        if field.type == FieldDescriptor.TYPE_BOOL:
            parser.add_argument(flag, action="store_true", default=None, help=_HELP[field.name])
        elif _is_text_list(field):
            parser.add_argument(flag, action="append", metavar="TEXT", help=_HELP[field.name])
        else:
            parser.add_argument(flag, metavar="VALUE", help=_HELP[field.name])


def build_request(arguments: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """The request that the flags describe. Reads standard input where no prompt is given. Raises UsageError."""
    request = generate_pb2.GenerateRequest()
    for field, group in _fields():
        given = getattr(arguments, field.name)
        if given is None:
            continue
        try:
            _set(getattr(request, group) if group else request, field, given)
        except (ValueError, TypeError) as error:
            raise UsageError(f"--{field.name.replace('_', '-')} can't be {given!r}: {error}") from error
    if arguments.token_ids is not None:
        if arguments.prompt is not None:
            raise UsageError("a prompt and --token-ids can't be given together")
        try:
            request.token_ids.ids.extend(_integers(arguments.token_ids))
        except ValueError as error:
            raise UsageError(f"--token-ids can't be {arguments.token_ids!r}: {error}") from error
        request.token_ids.SetInParent()
    else:
        try:
            request.text = _read_prompt(arguments.prompt)
        except UnicodeError as error:  # bytes that decode to nothing, or to what no text may hold
            raise UsageError("the prompt is not UTF-8") from error
    return request


def run(arguments: argparse.Namespace) -> int:
    """Streams one completion to the terminal; returns the exit status.

    0: finished, for whatever reason. 1: the call failed. 2: a flag can't be. 130: interrupted, the call cancelled.
    """
    try:
        request = build_request(arguments)
    except UsageError as error:
        print(f"runahead generate: {error}", file=sys.stderr)
        return EXIT_USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character gets the rest of the text
    with grpc.insecure_channel(arguments.url) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(request, timeout=arguments.timeout)
        try:
            has_text = True  # a server without a tokenizer takes no prompt as text
            if request.WhichOneof("prompt") == "token_ids":
                info = stub.GetModelInfo(model_pb2.GetModelInfoRequest(), timeout=arguments.timeout)
                has_text = info.has_tokenizer
            screen = _Screen(request.output, has_text)
            for response in call:
                screen.show(response)
        except KeyboardInterrupt:
            call.cancel()
            print("\nrunahead generate: interrupted, the request is cancelled", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            call.cancel()
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
            return EXIT_FAILED
        except grpc.RpcError as error:
            print(f"\nrunahead generate: {describe_failure(error, arguments.url)}", file=sys.stderr)
            return EXIT_FAILED
    return 0


def describe_failure(error: grpc.RpcError, url: str) -> str:
    """Status and message; a line for each field that the server objects to, beside the one that the message names."""
    call: Any = error  # what a stub raises is both an error and its call
    if call.code() == grpc.StatusCode.UNAVAILABLE and "connect" in (call.details() or ""):
        return f"no server answers at {url}; start one with `runahead serve`"
    line = f"{call.code().name}: {call.details()}"
    status = rpc_status.from_call(call)
    for detail in status.details if status else ():
        violations = error_details_pb2.BadRequest()
        if detail.Unpack(violations):
            others = (item.description for item in violations.field_violations if item.description != call.details())
            line += "".join(f"\n  {sentence}" for sentence in others)
    return line


def describe_finish(finished: generate_pb2.Finished) -> str:
    """One line: reason, usage, seed and pace."""
    reason = generate_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")
    matched = finished.stop.WhichOneof("match")
    parts = [
        reason + (f" {getattr(finished.stop, matched)!r}" if matched else ""),
        f"{finished.usage.prompt_tokens} prompt tokens ({finished.usage.cached_tokens} cached)",
        f"{finished.usage.completion_tokens} completion tokens",
        f"seed {finished.seed}",
    ]
    timing = finished.timing
    if timing.HasField("first_token"):
        parts.append(f"first token after {timing.first_token.ToTimedelta().total_seconds() * 1e3:.0f} ms")
    decode_s = timing.decode.ToTimedelta().total_seconds()
    if decode_s > 0:
        parts.append(f"then {(finished.usage.completion_tokens - 1) / decode_s:.0f} tokens/s")
    return ", ".join(parts)


class _Screen:
    """Text on standard output as it arrives; log-probabilities, and how it ended, on standard error.

    has_text: the server has a tokenizer. One without gives ids alone, which are then written in place of the text.
    """

    def __init__(self, output: generate_pb2.OutputOptions, has_text: bool) -> None:
        self._has_text = has_text
        self._echo = output.echo
        self._prompt_logprobs = output.HasField("prompt_logprobs")
        self._prompt_text = codecs.getincrementaldecoder("utf-8")("replace")  # an event may end inside a character

    def show(self, response: generate_pb2.GenerateResponse) -> None:
        event = response.WhichOneof("event")
        if event == "delta":
            _write(response.delta.text)
            for token in response.delta.tokens:
                if not self._has_text:
                    _write(f"{token.id} ")
                if token.HasField("logprob"):
                    _print_token(token)
        elif event == "prompt":
            self._show_prompt(response.prompt.tokens)
        elif event == "finished":
            _write("\n")
            print(f"[{describe_finish(response.finished)}]", file=sys.stderr)

    def _show_prompt(self, tokens: Any) -> None:
        if self._echo:
            _write(self._prompt_text.decode(b"".join(token.bytes for token in tokens)))
        if self._prompt_logprobs:
            for token in tokens:
                _print_token(token)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_token(token: Any) -> None:
    """Id, bytes, log-probability (the prompt's first token has none), and the most likely tokens at its position."""
    own = f" {token.logprob:.4f}" if token.HasField("logprob") else ""
    top = "".join(f"  {item.bytes!r} {item.logprob:.4f}" for item in token.top)
    print(f"[{token.id} {token.bytes!r}{own}{top}]", file=sys.stderr)


def _fields() -> Iterator[tuple[Any, str]]:
    """Descriptors of the fields that are flags, each with the name of the message it is in ('': the request itself)."""
    descriptor: Any = generate_pb2.GenerateRequest.DESCRIPTOR  # its class depends on protobuf's implementation
    for field in descriptor.fields:
        if field.name in _GROUPS:
            for inner in field.message_type.fields:
                yield inner, field.name
        elif field.containing_oneof is None or field.containing_oneof.name != "prompt":
            yield field, ""


def _set(message: Any, field: Any, given: Any) -> None:
    """Raises ValueError or TypeError for a value that the field can't hold."""
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


def _is_text_list(field: Any) -> bool:
    return bool(field.is_repeated) and field.type == FieldDescriptor.TYPE_STRING


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _read_prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if sys.stdin.isatty():
        raise UsageError("there is no prompt; give one as an argument or on standard input")
    return sys.stdin.read()
