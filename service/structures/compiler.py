"""The front end's side of its compile process."""

from __future__ import annotations

import signal
from typing import Final

from runahead.service.contract.errors import ServiceError, no_structure
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.structure import StructureSource
from runahead.service.structures.compile_messages import Answer, Ask, Vocabulary
from runahead.service.workers.worker_process import UnusableError, WorkerLostError, WorkerProcess

COMPILE_MODULE: Final = "runahead.service.structures.compile_process"
_WALL: Final = 20  # wall time for a structure on a busy machine, in multiples of its processor time


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
