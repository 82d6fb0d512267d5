"""A process that tokenizes: `python -m runahead.service.text.tokenizer_process`.

Its first input line is a `Description`; each further line is an `Ask`, answered by an `Answer`. Untrusted regular
expressions may take any time and memory: the system ends the process beyond its processor time for an `Ask`, and it
aborts beyond its memory.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Final

import msgspec
from tokenizers import Tokenizer

from runahead.service.workers.worker_side import Ready, data_bytes, read_orders, say

PROCESSOR_S: Final = 5.0  # known expressions take a second for the longest text
MEMORY_BYTES: Final = 1 << 30  # beside the tokenizer: known expressions take 310 MiB for the longest text


class Description(msgspec.Struct, frozen=True):
    """The first message. text: of `tokenizer.json`."""

    text: str


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A question. text: to tokenize; None: detokenize ids. special: add or show special tokens."""

    text: str | None
    ids: tuple[int, ...]
    special: bool


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """An answer. failed: the library has failed; other fields are empty."""

    ids: tuple[int, ...] = ()
    text: str = ""
    failed: bool = False


def main() -> None:
    orders = read_orders(Description)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = Tokenizer.from_str(orders.text)
    most = data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    say(Ready())
    try:
        for line in sys.stdin.buffer:
            ask = msgspec.json.decode(line, type=Ask)
            signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
            answer = _answer(tokenizer, ask)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            say(answer)
    except MemoryError:
        os.abort()  # like the library


def _answer(tokenizer: Tokenizer, ask: Ask) -> Answer:
    try:
        if ask.text is None:
            return Answer(text=tokenizer.decode(list(ask.ids), skip_special_tokens=not ask.special))
        return Answer(ids=tuple(tokenizer.encode(ask.text, add_special_tokens=ask.special).ids))
    except MemoryError:
        raise
    except BaseException:  # panics derive from BaseException
        return Answer(failed=True)


if __name__ == "__main__":
    main()
