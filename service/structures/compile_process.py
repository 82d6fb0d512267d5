"""The process that compiles structures for one front end: `python -m runahead.service.structures.compile_process`.

Reads JSON lines from standard input and writes one answer for each to standard output
(`runahead.service.structures.compile_messages`). Callers' text is compiled here, so that the system can limit it: a
signal ends the process beyond a structure's processor time, and refused memory ends it too. The process ends when its
input ends.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from llguidance import LLTokenizer

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.grammar.matcher import GrammarError, VocabularyError, load_vocabulary, new_matcher
from runahead.service.structures.compile_messages import Answer, Ask, StructureFault, Vocabulary
from runahead.service.structures.grammar_text import grammar_text, of_schema
from runahead.service.structures.schema_check import Schema, parts
from runahead.service.workers.worker_side import Ready, data_bytes, read_orders, say

_MIB: Final = 1 << 20
_SEARCH_S: Final = 0.2  # part of the time bound to locate a fault in a schema
_NOTHING: Final = "NoExtension"  # prefix of the library's reasons for grammars that match nothing
_WORDS: Final = 300  # characters of the library's reasons that are passed on


def main() -> int:
    """Answer until the input ends. Returns the exit code."""
    orders = read_orders(Vocabulary)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        vocabulary = load_vocabulary(
            open_checkpoint(Path(orders.model)).tokenizer(), orders.vocab_size, orders.eos_token_ids
        )
    except (CheckpointError, VocabularyError) as error:
        say(Ready(unusable=str(error)))
        return 0
    say(Ready())
    began = data_bytes()
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line, type=Ask)
        with _bounds(orders):
            answer = compiled(vocabulary, ask, orders)
        is_last = data_bytes() - began > orders.memory_mb * _MIB
        say(msgspec.structs.replace(answer, is_last=is_last))
        if is_last:
            return 0
    return 0


def compiled(vocabulary: LLTokenizer, ask: Ask, orders: Vocabulary) -> Answer:
    """Compile the structure to a grammar, or describe its fault."""
    try:
        grammar, schema = grammar_text(ask.kind, ask.text, ask.depth)
        try:
            _try(vocabulary, grammar)
        except StructureFault as fault:
            raise _where(vocabulary, schema, fault, orders) from None
    except StructureFault as fault:
        return Answer(location=fault.location, sentence=fault.sentence)
    except MemoryError:
        return Answer(sentence=f"needs more than {orders.memory_mb} MiB of memory to be compiled")
    return Answer(grammar=grammar)


def _try(vocabulary: LLTokenizer, grammar: str) -> None:
    """Try the grammar's first token. Raises StructureFault for a grammar that is invalid, too costly or matches
    nothing.
    """
    try:
        matcher = new_matcher(vocabulary, grammar)
    except GrammarError as error:
        raise StructureFault("", f"can't be compiled: {_line(error)}") from None
    matcher.compute_bitmask()
    if matcher.is_error():
        reason = _line(matcher.get_error())
        if reason.startswith(_NOTHING):
            raise StructureFault("", "has nothing that matches it")
        raise StructureFault("", f"costs too much at its first position: {reason}")


def _where(vocabulary: LLTokenizer, schema: Schema | None, fault: StructureFault, orders: Vocabulary) -> StructureFault:
    """Locate the fault in the schema: the innermost part that has the fault alone."""
    if not isinstance(schema, dict):
        return fault
    kept: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    until = time.process_time() + orders.compile_s * _SEARCH_S
    for location, part in parts(schema):
        if location == "#" or time.process_time() > until:
            break
        if not isinstance(part, dict):
            continue
        try:
            _try(vocabulary, of_schema({**part, **kept}))
        except StructureFault as inner:
            return StructureFault(location, inner.sentence)
    return StructureFault("#", fault.sentence)


@contextlib.contextmanager
def _bounds(orders: Vocabulary) -> Iterator[None]:
    """Limit processor time, beyond which the system ends this process, and memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + orders.memory_mb * _MIB, hard))
    signal.setitimer(signal.ITIMER_PROF, orders.compile_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _line(words: object) -> str:
    """Shorten the library's reason to one readable line."""
    text = " ".join(str(words).replace("<non-verbose/>", "").split())
    return text if len(text) <= _WORDS else text[:_WORDS] + "…"


if __name__ == "__main__":
    sys.exit(main())
