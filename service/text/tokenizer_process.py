"""A process that turns texts into ids and back: `python -m runahead.service.text.tokenizer_process`.

Its first line of input is the tokenizer, as `tokenizer.json` has it; then each line is an `Ask`, and is answered by a
line with an `Answer`. Regular expressions of a stranger may take any time: beyond its processor time for one `Ask` the
system ends the process.
"""

from __future__ import annotations

import resource
import signal
import sys
from typing import Final

import msgspec
from tokenizers import Tokenizer

from runahead.runtime.parent_death import signal_at_parents_death

PROCESSOR_S: Final = 5.0  # known expressions take a second for the longest text


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
    for line in said:
        ask = msgspec.json.decode(line, type=Ask)
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        answer = _answer(tokenizer, ask)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _answer(tokenizer: Tokenizer, ask: Ask) -> Answer:
    try:
        if ask.text is None:
            return Answer(text=tokenizer.decode(list(ask.ids), skip_special_tokens=not ask.special))
        return Answer(ids=tuple(tokenizer.encode(ask.text, add_special_tokens=ask.special).ids))
    except BaseException:  # a panic is no Exception
        return Answer(failed=True)


if __name__ == "__main__":
    main()
