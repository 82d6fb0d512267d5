"""A process that turns texts into ids and back: `python -m runahead.service.text.tokenizer_process`.

Its first line of input is the tokenizer, as `tokenizer.json` has it; then each line is an `Ask`, and is answered by a
line with an `Answer`. Regular expressions of a stranger may take any time and memory: beyond its processor time for one
`Ask` the system ends the process, and beyond its memory it aborts.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import Tokenizer

from runahead.runtime.parent_death import signal_at_parents_death

PROCESSOR_S: Final = 5.0  # known expressions take a second for the longest text
_STATM: Final = Path("/proc/self/statm")
MEMORY_BYTES: Final = 1 << 30  # beside the tokenizer: known expressions take 310 MiB for the longest text


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """text: to be made ids of; None: ids are to be made a text of. special: special tokens are added, or shown."""

    text: str | None
    ids: tuple[int, ...]
    special: bool


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """failed: the library has failed, and there is nothing else in it."""

    ids: tuple[int, ...] = ()
    text: str = ""
    failed: bool = False


def main() -> None:
    signal_at_parents_death()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    said = sys.stdin.buffer
    tokenizer = Tokenizer.from_str(msgspec.json.decode(said.readline(), type=str))
    most = _data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        for line in said:
            ask = msgspec.json.decode(line, type=Ask)
            signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
            answer = msgspec.json.encode(_answer(tokenizer, ask)) + b"\n"
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()
    except MemoryError:
        os.abort()  # as the library does


def _answer(tokenizer: Tokenizer, ask: Ask) -> Answer:
    try:
        if ask.text is None:
            return Answer(text=tokenizer.decode(list(ask.ids), skip_special_tokens=not ask.special))
        return Answer(ids=tuple(tokenizer.encode(ask.text, add_special_tokens=ask.special).ids))
    except MemoryError:
        raise
    except BaseException:  # a panic is no Exception
        return Answer(failed=True)


def _data_bytes() -> int:
    """What `RLIMIT_DATA` bounds; 0 where the system does not tell, and bounds nothing of it."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
