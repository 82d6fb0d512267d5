"""`runahead generate`: prints a completion as it arrives."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import sys
from collections import defaultdict
from typing import Any

import grpc

from runahead.service.commands.client import ClientCalls
from runahead.service.commands.client_channel import endpoint
from runahead.service.commands.ends import EXIT_INTERRUPTED
from runahead.service.commands.request_flags import add_flags as add_flags
from runahead.service.commands.request_flags import build_request, chat_request, is_greedy, seconds_of, system_messages
from runahead.service.commands.terminal_text import Screen
from runahead.v1 import generate_pb2


def run(arguments: argparse.Namespace) -> int:
    """Stream one completion to the terminal. Returns the exit status.

    0: finished, for any reason. 1: the call failed. 2: a flag is invalid. 130: interrupted, the call cancelled.
    """
    server = endpoint(arguments)
    timeout_s = None if arguments.timeout is None else seconds_of(arguments.timeout)
    request = build_request(arguments)
    completion = _Completion(request)
    with server.channel() as channel:
        calls = ClientCalls(channel, server.metadata, timeout_s)
        try:
            if arguments.chat:
                message = generate_pb2.ChatMessage(role="user", content=request.text)
                request = chat_request(request, [*system_messages(arguments.system), message])
            elif request.WhichOneof("prompt") == "token_ids":  # a server without a tokenizer takes no text
                completion.has_text = calls.model_info().has_tokenizer
            with contextlib.closing(calls.generate(request)) as responses:
                for response in responses:
                    completion.show(response)
        except KeyboardInterrupt:
            print("\nrunahead generate: interrupted, the request is cancelled", file=sys.stderr)
            return EXIT_INTERRUPTED
        except grpc.RpcError:
            print(completion.line_end, end="", file=sys.stderr)
            raise
    return 0


def describe_finish(finished: generate_pb2.Finished, *, is_greedy: bool = False) -> str:
    """Describe an end in one line: reason, usage, seed and speed. is_greedy: the seed had no effect."""
    reason = generate_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")
    matched = finished.stop.WhichOneof("match")
    pace, drafted = tokens_per_second(finished), finished.usage.drafted_tokens
    parts = [
        reason + (f" {getattr(finished.stop, matched)!r}" if matched else ""),
        f"{finished.usage.prompt_tokens} prompt tokens ({finished.usage.cached_tokens} cached)",
        f"{finished.usage.completion_tokens} completion tokens",
        *([f"{finished.usage.accepted_tokens} of {drafted} drafts right"] if drafted else []),
        *([] if is_greedy else [f"seed {finished.seed}"]),
    ]
    timing = finished.timing
    if timing.HasField("first_token"):
        queued, first = (part.ToTimedelta().total_seconds() * 1e3 for part in (timing.queue, timing.first_token))
        parts.append(f"first token after {first:.0f} ms ({queued:.0f} queued)")
    if pace is not None:
        parts.append(f"then {pace:.0f} tokens/s")
    return ", ".join(parts)


def tokens_per_second(finished: generate_pb2.Finished) -> float | None:
    """Return the tokens a second after the first token; None without a second one."""
    decode_s = finished.timing.decode.ToTimedelta().total_seconds()
    return (finished.usage.completion_tokens - 1) / decode_s if decode_s > 0 else None


class _Completion:
    """Prints text on standard output as it arrives, and log-probabilities and ends on standard error. Several
    completions are printed one by one at their ends, after a line on standard error with the index.

    has_text: the server has a tokenizer; otherwise ids are printed.
    line_end: the end of a line with text.
    """

    def __init__(self, request: generate_pb2.GenerateRequest) -> None:
        output = request.output
        self._is_greedy = is_greedy(request)
        self._are_several = request.n > 1
        self._deltas: dict[int, list[generate_pb2.Delta]] = defaultdict(list)  # of unfinished completions, by index
        self._screen = Screen()
        self.has_text = True
        self.line_end = ""
        self._echo = output.echo
        self._prompt_logprobs = output.HasField("prompt_logprobs")
        self._prompt_text = codecs.getincrementaldecoder("utf-8")("replace")  # an event may end inside a character

    def show(self, response: generate_pb2.GenerateResponse) -> None:
        event = response.WhichOneof("event")
        self.line_end = self.line_end if event == "accepted" else "\n"
        if event == "delta" and self._are_several:
            self._deltas[response.delta.index].append(response.delta)
        elif event == "delta":
            self._show_delta(response.delta)
        elif event == "prompt":
            self._show_prompt(response.prompt.tokens)
        elif event == "finished":
            if self._are_several:
                print(f"[completion {response.finished.index}]", file=sys.stderr)
            for delta in self._deltas.pop(response.finished.index, ()):
                self._show_delta(delta)
            self._screen.write("\n")
            print(f"[{describe_finish(response.finished, is_greedy=self._is_greedy)}]", file=sys.stderr)

    def _show_delta(self, delta: generate_pb2.Delta) -> None:
        self._screen.write(delta.text)
        for token in delta.tokens:
            if not self.has_text:
                self._screen.write(f"{token.id} ")
            if token.HasField("logprob"):
                _print_token(token)

    def _show_prompt(self, tokens: Any) -> None:
        if self._echo:
            self._screen.write(self._prompt_text.decode(b"".join(token.bytes for token in tokens)))
        if self._prompt_logprobs:
            for token in tokens:
                _print_token(token)


def _print_token(token: Any) -> None:
    """Print id, bytes, log-probability (not for the prompt's first token) and the top tokens at its position."""
    own = f" {token.logprob:.4f}" if token.HasField("logprob") else ""
    top = "".join(f"  {item.bytes!r} {item.logprob:.4f}" for item in token.top)
    print(f"[{token.id} {token.bytes!r}{own}{top}]", file=sys.stderr)
