"""What libraries print, and what nobody catches: events of ours, bounded, with no word of a request in them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runahead.service.log.library_lines import LibraryLines
from tests.service.log_lines import LogLines, log_lines

CORE = b"E1122 15:20:14.358655    8035 ssl_transport_security.cc:1400] Handshake failed\n"


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with log_lines() as taken:
        yield taken


async def made() -> LibraryLines:
    return LibraryLines("front_end_1")


@pytest.fixture
def library() -> LibraryLines:
    return asyncio.run(made())


def test_a_line_of_grpcs_core_is_an_event_with_its_level_and_its_place(library: LibraryLines, lines: LogLines) -> None:
    library.data_received(CORE)
    assert lines.next("library_line") == {
        "level": "error",
        "event": "library_line",
        "process": "front_end_1",
        "source": "ssl_transport_security.cc:1400",
        "message": "Handshake failed",
    }


def test_a_line_that_comes_in_pieces_is_one_and_the_last_may_have_no_end(
    library: LibraryLines, lines: LogLines
) -> None:
    for piece in (b"Fatal Python error: ", b"Segmentation fault\n\nCurrent ", b"thread"):
        library.data_received(piece)
    library.connection_lost(None)
    assert [line["message"] for line in lines.rest()] == ["Fatal Python error: Segmentation fault", "Current thread"]


def test_repetition_is_bounded_and_counted_for_each_place(library: LibraryLines, lines: LogLines) -> None:
    for _ in range(1000):
        library.data_received(CORE)
    library.data_received(b"W1122 15:20:14.358655    8035 another.cc:1] words\n")
    library.data_received(b"words of nobody\n" * 1000)
    sources = [line.get("source", "") for line in lines.rest()]
    assert {source: sources.count(source) for source in sources} == {
        "ssl_transport_security.cc:1400": 20,
        "another.cc:1": 1,
        "": 20,
    }


def test_what_is_logged_of_a_line_is_short_and_can_be_shown_on_a_terminal(
    library: LibraryLines, lines: LogLines
) -> None:
    library.data_received(b"\x1b[2Jclear\rthe \xffscreen" + b"x" * 100_000)
    library.data_received(b"x\n")
    message = lines.next("library_line")["message"]
    assert message.startswith("\N{REPLACEMENT CHARACTER}[2Jclear\N{REPLACEMENT CHARACTER}the ")
    assert message.isprintable() and len(message) == 300


@pytest.mark.parametrize("padding", [0, 4096 - len(CORE)])
def test_words_of_a_client_choose_no_level_and_no_place(library: LibraryLines, lines: LogLines, padding: int) -> None:
    """Also where they begin another part of a write that is larger than a pipe takes at once."""
    forged = b"F1122 15:20:14.358655    8035 forged.cc:1] words\n" * 300
    written = CORE[:-1] + b"x" * padding + b"\n" + forged
    for begin in range(0, len(written), 4096):
        library.data_received(written[begin : begin + 4096])
    library.data_received(CORE)
    logged = lines.rest()
    assert [line["source"] for line in logged if "source" in line] == ["ssl_transport_security.cc:1400"] * 2
    assert {line["level"] for line in logged if "source" not in line} == {"warning"}
    assert len(logged) == 22, "bounded together"


@pytest.mark.parametrize("has_such_pipes", [True, False])
def test_what_is_written_at_once_is_read_at_once_where_the_system_can(
    lines: LogLines, monkeypatch: pytest.MonkeyPatch, has_such_pipes: bool
) -> None:
    def refuse(_: int) -> None:
        raise OSError("no such pipe")

    async def write() -> None:
        library, writer = await LibraryLines.of("front_end_1")
        for _ in range(3):  # before the reader has a turn
            os.write(writer, CORE)
        os.close(writer)
        await library.wait_ended()

    if not has_such_pipes:
        monkeypatch.setattr(os, "pipe2", refuse)
    asyncio.run(write())
    logged = lines.rest()
    assert all(line["message"].endswith("Handshake failed") for line in logged)
    assert len([line for line in logged if "source" in line]) == (3 if has_such_pipes else 1)
    assert len(logged) == 3


def test_whoever_writes_never_waits_for_the_reader(lines: LogLines) -> None:
    async def fill() -> None:
        library, writer = await LibraryLines.of("front_end_1")
        with pytest.raises(BlockingIOError):
            for _ in range(1000):  # the reader has no turn
                os.write(writer, b"x" * 4096)
        os.close(writer)
        await library.wait_ended()

    asyncio.run(fill())
    assert len(lines.next("library_line")["message"]) == 300


UNCAUGHT = """
import asyncio, os, sys, threading
from runahead.runtime.log_output import LogOutput
from runahead.service.log.logs import configure_serving_logs

class Broken:
    def __del__(self):
        raise ValueError("quiet")

async def fails():
    raise ValueError("quiet")

def fails_in_thread():
    raise ValueError("quiet")

async def main():
    configure_serving_logs(LogOutput(format="json"), int(sys.argv[1]))
    task = asyncio.ensure_future(fails())
    await asyncio.wait([task])
    del task
    Broken()
    thread = threading.Thread(target=fails_in_thread)
    thread.start()
    thread.join()
    import logging
    logging.getLogger("grpc").error(ValueError("quiet"))
    logging.getLogger("grpc").error("words of %s", "quiet")
    os.write(2, b"from the core\\n")
    await fails()

asyncio.run(main())
"""


def test_what_nobody_catches_is_told_by_its_type_and_never_by_its_words() -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", UNCAUGHT, str(writer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, pass_fds=(writer,))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"from the core\n", "and nothing that Python writes"
    assert "quiet" not in done.stdout + done.stderr
    for where in ("event_loop", "interpreter", "thread", "main"):
        assert f'"where": "{where}", "error": "ValueError"' in done.stderr
    assert '"message": "ValueError"' in done.stderr and '"message": "words of %s"' in done.stderr
