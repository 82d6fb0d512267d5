"""Compiles the structures of a front end's requests in a separate process, and caches them."""

from __future__ import annotations

import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import Final

from runahead.runtime.checkpoint import BUNDLED, BUNDLED_FOLDER
from runahead.runtime.grammar.extra import INSTALL, is_installed
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.contract.errors import ServiceError, Violation, invalid_argument, no_structure
from runahead.service.contract.inputs import StructureSource
from runahead.service.contract.limits import LIMITS
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import FrontEndCounters
from runahead.service.structures.compile_messages import Answer, Ask, Vocabulary
from runahead.service.workers.caller_turns import Turns
from runahead.service.workers.worker_process import UnusableError, WorkerLostError, WorkerProcess

COMPILE_MODULE: Final = "runahead.service.structures.compile_process"
_WALL: Final = 20  # wall time for a structure on a busy machine, in multiples of its processor time

_ENTRY_BYTES: Final = 500  # of a cached entry, beside its texts


class Compiler:
    """A process that compiles one structure at a time. Use it in one task at a time and close it.

    vocabulary: the model's tokens and a structure's limits.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.worker = WorkerProcess(COMPILE_MODULE, vocabulary, "structure", "compiles structures")

    async def compile(self, source: StructureSource) -> Answer:
        """Compile a structure. Returns the process's answer, or why it was ended.

        Raises ServiceError: FAILED_PRECONDITION if the model's tokens can't be used; UNAVAILABLE if no process can be
        started, it was ended, or it did not answer in time although it used little processor time.
        """
        ask = Ask(source.kind, source.text, LIMITS.structure_depth)
        try:
            answer = await self.worker.ask(ask, Answer, _WALL * self._vocabulary.compile_s)
        except UnusableError as error:
            raise no_structure(str(error)) from None
        except WorkerLostError as error:
            raise _unavailable(str(error)) from None
        except TimeoutError:
            raise _unavailable("a structure was not compiled in time") from None
        if isinstance(answer, int):
            return Answer(sentence=self._why(answer))
        if answer.is_last:
            await self.worker.end()
        return answer

    async def close(self) -> None:
        """End the process for good."""
        await self.worker.close()

    def _why(self, code: int) -> str:
        """Return a structure's fault that ended the process. Raises ServiceError if the structure did not cause the
        end.
        """
        if code == -signal.SIGPROF:
            return f"takes more than {self._vocabulary.compile_s:g} s of processor time to be compiled"
        if code == -signal.SIGABRT:  # the library aborts when memory is refused
            return f"needs more than {self._vocabulary.memory_mb} MiB of memory to be compiled"
        if code == -signal.SIGSEGV:
            return "needs more of the stack than there is to be compiled"
        raise _unavailable("the process that compiled the request's structure was ended")


def _unavailable(sentence: str) -> ServiceError:
    return ServiceError("STRUCTURE_LOST", f"{sentence}; the request may be sent again")


def why_none(info: EngineInfo) -> str:
    """Say why requests can have no structure, as the end of a sentence; empty if they can."""
    if not is_installed():
        return f"it was installed without what structures need; {INSTALL} brings it"
    if not info.structures:
        return f"its engine follows none on the device {info.device}"
    return ""


class Structures:
    """Compiles structures. Use it on one event loop and close it.

    counters: the front end's.
    """

    def __init__(self, info: EngineInfo, settings: FrontEndSettings, counters: FrontEndCounters) -> None:
        self._refusal = why_none(info)
        self._compiler = Compiler(
            Vocabulary(
                model=str(BUNDLED_FOLDER if settings.model == BUNDLED else Path(settings.model)),
                vocab_size=info.vocab_size,
                eos_token_ids=info.eos_token_ids,
                compile_s=settings.structure_compile_s,
                memory_mb=settings.structure_memory_mb,
            )
        )
        self._counters = counters
        self._turns = Turns()
        self._known: OrderedDict[StructureSource, Answer] = OrderedDict()  # newest last
        self._known_bytes = 0

    @property
    def waiting(self) -> int:
        """The number of waiting structures."""
        return self._turns.waiting

    def is_known(self, source: StructureSource) -> bool:
        """Whether `grammar` returns without waiting."""
        return bool(self._refusal) or source in self._known

    async def grammar(self, source: StructureSource, caller: int) -> str:
        """Return a structure's grammar for `Submit`. caller: callers take turns.

        Raises ServiceError: INVALID_ARGUMENT with the fault's location, FAILED_PRECONDITION if structures are not
        served, and the errors of `Compiler.compile`.
        """
        if self._refusal:
            raise no_structure(self._refusal)
        if (answer := self._remembered(source)) is None:
            # A cancelled waiter does not end work that others may need.
            answer = await self._turns.do(caller, lambda: self._compiled(source))
        if answer.sentence:
            raise invalid_argument([_violation(source, answer)])
        return answer.grammar

    async def close(self) -> None:
        """End the compile process."""
        await self._compiler.close()

    async def _compiled(self, source: StructureSource) -> Answer:
        """Compile a structure, unless it was compiled meanwhile."""
        if (known := self._remembered(source)) is not None:  # compiled while it waited
            return known
        began = time.monotonic()
        answer = await self._compiler.compile(source)
        self._counters.structures_compiled += 1
        self._counters.structure_compile_us += round((time.monotonic() - began) * 1e6)
        self._remember(source, answer)
        return answer

    def _remembered(self, source: StructureSource) -> Answer | None:
        answer = self._known.get(source)
        if answer is not None:
            self._known.move_to_end(source)
            self._counters.structure_hits += 1
        return answer

    def _remember(self, source: StructureSource, answer: Answer) -> None:
        self._known[source] = answer
        self._known_bytes += _size(source, answer)
        while self._known_bytes > LIMITS.structure_cache_bytes:
            self._known_bytes -= _size(*self._known.popitem(last=False))


def _size(source: StructureSource, answer: Answer) -> int:
    return 4 * (len(source.text) + len(answer.grammar) + len(answer.sentence)) + _ENTRY_BYTES


def _violation(source: StructureSource, answer: Answer) -> Violation:
    """Make the violation: a location in a schema extends the path, a grammar's line begins the sentence."""
    if answer.location.startswith("#"):
        path = source.field + ("" if answer.location == "#" else answer.location)
        return Violation(path, f"{path} {answer.sentence}")
    if answer.location:
        return Violation(source.field, f"{source.field} {answer.sentence} ({answer.location})")
    return Violation(source.field, f"{source.field} {answer.sentence}")
