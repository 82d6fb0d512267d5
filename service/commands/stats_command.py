"""`runahead stats`: shows a server's figures, live or once."""

from __future__ import annotations

import argparse
import io
import select
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from runahead.service.commands.client_channel import Metadata, endpoint
from runahead.service.commands.request_flags import seconds_of
from runahead.v1 import generation_service_pb2_grpc, stats_pb2

# VT100 sequences, and xterm's alternate screen.
_OTHER_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
_BACK_AGAIN: Final = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

_Stub = generation_service_pb2_grpc.GenerationServiceStub

ONCE_S: Final = 10.0  # default time-out of a single answer
_NAME: Final = 15  # columns of a group's name
_FOR_MACHINES: Final = "_histogram"  # groups with this end are not printed


def stats_lines(stats: stats_pb2.ServerStats) -> list[str]:
    """Return one line for each group of figures, its name first, in the contract's words and order."""
    fields: Any = stats.DESCRIPTOR.fields  # its class depends on protobuf's implementation
    groups = {field.name: _value(stats, field) for field in fields if not field.name.endswith(_FOR_MACHINES)}
    return [f"{name:<{_NAME}}{text}" for name, text in groups.items()]


def _value(message: Any, field: Any) -> str:
    """Format a field: `5`, a message's figures, a map's entries or a list."""
    value = getattr(message, field.name)
    if not field.is_repeated:
        return _one(value)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "; ".join(f"{key}: {_one(value[key])}" for key in sorted(value)) or "none"
    return "; ".join(map(_one, value)) or "none"


def _one(value: Any) -> str:
    if not isinstance(value, Message):
        return f"{value:.3f}" if isinstance(value, float) else str(value)
    fields: Any = value.DESCRIPTOR.fields
    figures = (
        f"{field.name} ({_value(value, field)})" if field.is_repeated else f"{field.name} {_value(value, field)}"
        for field in fields
        if not field.has_presence or value.HasField(field.name)
    )
    return ", ".join(figures) or "unknown"


def rate_line(before: stats_pb2.ServerStats, now: stats_pb2.ServerStats) -> str:
    """Return rates a second between two moments."""
    seconds = max(now.uptime_s - before.uptime_s, 1e-3)
    generated = (now.tokens.generated - before.tokens.generated) / seconds
    prompts = (now.tokens.prompt - before.tokens.prompt) / seconds
    ended = (sum(now.requests.finished.values()) - sum(before.requests.finished.values())) / seconds
    return (
        f"{'pace':<{_NAME}}over {seconds:.1f} s: {generated:.0f} tokens/s generated, {prompts:.0f} of prompts, "
        f"{ended:.1f} requests/s ended"
    )


class View:
    """Appends samples as text, with an empty line between them."""

    def __init__(self) -> None:
        self._before: stats_pb2.ServerStats | None = None

    def show(self, stats: stats_pb2.ServerStats) -> None:
        """Show one sample. Raises BrokenPipeError if nobody reads."""
        lines = stats_lines(stats)
        if self._before is not None:
            lines.append(rate_line(self._before, stats))
        self._write(lines)
        self._before = stats

    def end(self) -> None:
        """End the output. Idempotent."""

    def _write(self, lines: list[str]) -> None:
        print("\n".join(lines if self._before is None else ["", *lines]), flush=True)


class JsonLines(View):
    """One JSON line for each sample, in protobuf's JSON with the contract's names and zeros."""

    def show(self, stats: stats_pb2.ServerStats) -> None:
        # protobuf writes 64-bit integers as strings, because not every JSON reader has such numbers.
        text = MessageToJson(
            stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
        )
        print(text, flush=True)


class Screen(View):
    """Shows samples in place on the terminal's alternate screen.

    title: the first line.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._is_open = False

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            print(_BACK_AGAIN, end="", flush=True)

    def _write(self, lines: list[str]) -> None:
        columns, rows = shutil.get_terminal_size()
        wrapped = [part for line in lines for part in textwrap.wrap(line, columns, subsequent_indent=" " * _NAME)]
        shown = "".join(f"{line}{_CLEAR_LINE}\n" for line in [self._title[:columns], "", *wrapped][: rows - 1])
        begin = "" if self._is_open else _OTHER_SCREEN
        self._is_open = True
        print(begin + _HOME + shown + _CLEAR_BELOW, end="", flush=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of interval and format."""
    parser.add_argument("--once", action="store_true", help="print the figures once, and end")
    parser.add_argument("--json", action="store_true", help="print one line of JSON each time, by the contract's names")
    parser.add_argument("--interval", metavar="SECONDS", help="at least so long from one time to the next (default: 1)")
    parser.add_argument("--timeout", metavar="SECONDS", help="end after this long (default: never, with --once: 10)")


def run(arguments: argparse.Namespace) -> int:
    """Show figures. Returns the exit status.

    0: shown once, or until Ctrl-C or --timeout. 1: the call failed. 2: a flag is invalid.
    """
    server = endpoint(arguments)
    timeout_s = None if arguments.timeout is None else seconds_of(arguments.timeout)
    request = stats_pb2.WatchStatsRequest()
    if arguments.interval is not None:
        request.interval.FromNanoseconds(round(seconds_of(arguments.interval, "interval") * 1e9))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with server.channel() as channel:
        stub = _Stub(channel)
        if arguments.once:
            figures = _once(stub, server.metadata, timeout_s)
        else:
            figures = _watched(stub, server.metadata, request, timeout_s)
        return _show(figures, _view(arguments), arguments)


def _show(figures: Iterator[stats_pb2.ServerStats], view: View, arguments: argparse.Namespace) -> int:
    try:
        try:
            for stats in figures:
                view.show(stats)
        finally:
            view.end()  # restores the terminal before a failure is printed
    except KeyboardInterrupt:
        return 0
    except grpc.RpcError as error:
        has_seen_enough = arguments.timeout is not None and not arguments.once
        if has_seen_enough and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return 0
        raise
    return 0


def _view(arguments: argparse.Namespace) -> View:
    if arguments.json:
        return JsonLines()
    if arguments.once or not sys.stdout.isatty():
        return View()
    return Screen(f"{arguments.url}, whenever a figure changes; Ctrl-C ends this")


def _once(stub: _Stub, metadata: Metadata, timeout_s: float | None) -> Iterator[stats_pb2.ServerStats]:
    timeout_s = ONCE_S if timeout_s is None else timeout_s
    yield stub.Stats(stats_pb2.StatsRequest(), timeout=timeout_s, metadata=metadata).stats


def _watched(
    stub: _Stub, metadata: Metadata, request: stats_pb2.WatchStatsRequest, timeout_s: float | None
) -> Iterator[stats_pb2.ServerStats]:
    call = stub.WatchStats(request, timeout=timeout_s, metadata=metadata)
    is_read = _while_read(call.cancel)
    try:
        for response in call:
            yield response.stats
    except grpc.RpcError:
        if not is_read():
            raise BrokenPipeError from None
        raise
    finally:
        call.cancel()


def _while_read(end: Callable[[], object]) -> Callable[[], bool]:
    """Call `end` when the reader of standard output closes it: unchanged figures are not written, so no write would
    fail. Returns whether it is open.
    """
    closed = threading.Event()
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    except (OSError, ValueError):  # not a file
        return lambda: True

    def watch() -> None:
        poll.poll()
        closed.set()
        end()

    threading.Thread(target=watch, name="reader", daemon=True).start()
    return lambda: not closed.is_set()
