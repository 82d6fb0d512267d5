"""Checks a checkpoint's files in a process with limits, before anything else reads them: `python -m
runahead.runtime.checkpoint.check_process`.

Reads a `CheckOrder` from standard input and writes a `CheckAnswer` to standard output. Parsing untrusted files may take
any time and memory: beyond its limits the system ends this process, and nothing else is lost.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import Final

import msgspec

from runahead.runtime.checkpoint.checkpoint import Checkpoint
from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.locate import check_files, open_checkpoint, open_head
from runahead.runtime.process_end import signal_at_parents_death

PROCESSOR_S: Final = 60
MEMORY_BYTES: Final = 2 << 30  # beside mapped files


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def size_of_tokenizer(checkpoint: Checkpoint) -> int:
    """Return the tokenizer's highest id plus one; 0 without a tokenizer of a known form.

    Raises CheckpointError for unreadable files.
    """
    if not checkpoint.has_tokenizer:
        return 0
    try:
        tokenizer = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer)
    except msgspec.DecodeError:  # the loader of the tokenizer reports the error
        return 0
    vocab = tokenizer.model.vocab
    end = max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)
    return max(end, *(token.id + 1 for token in tokenizer.added_tokens), 0)


class CheckOrder(msgspec.Struct, frozen=True):
    """What to check. model: its path. draft_model, draft_head: paths of drafters, or none. has_weights: weights are
    read. has_tokenizer: the tokenizer is used.
    """

    model: str
    draft_model: str = ""
    draft_head: str = ""
    has_weights: bool = True
    has_tokenizer: bool = True


class CheckAnswer(msgspec.Struct, frozen=True):
    """The result. refused: why the files are not served, empty if they are. tokenizer_vocab: see `EngineConfig`."""

    refused: str = ""
    tokenizer_vocab: int = 0


def main() -> None:
    signal_at_parents_death()
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckOrder)
    _bound()
    sys.stdout.buffer.write(msgspec.json.encode(_answer(order)))


def _bound() -> None:
    """Limit processor time and memory; the system ends this process beyond the former. The stacks of libraries'
    threads, one for each core, exist already and do not count.
    """
    memory = MEMORY_BYTES
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        memory += pages * resource.getpagesize()
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        # by a distinct signal, which a lack of memory does not send
        (resource.RLIMIT_CPU, PROCESSOR_S, PROCESSOR_S + 5),
        (resource.RLIMIT_DATA, memory, memory),
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is already set
            resource.setrlimit(kind, (soft, hard))


def _answer(order: CheckOrder) -> CheckAnswer:
    tokenizer_vocab = 0
    for path, is_head in ((order.model, False), (order.draft_head, True), (order.draft_model, False)):
        if not path:
            continue
        try:
            if is_head:
                open_head(Path(path))
            else:
                check_files(Path(path), has_weights=order.has_weights)
            if path == order.model and order.has_tokenizer:
                tokenizer_vocab = size_of_tokenizer(open_checkpoint(Path(path)))
        except CheckpointError as error:
            return CheckAnswer(str(error))
        except MemoryError:
            most = MEMORY_BYTES >> 20
            return CheckAnswer(f"{path} takes over {most} MiB of memory to be read, which no files of a model do")
        except Exception as error:  # any error of a reader with unforeseen files
            return CheckAnswer(str(CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}")))
    return CheckAnswer(tokenizer_vocab=tokenizer_vocab)


if __name__ == "__main__":
    main()
