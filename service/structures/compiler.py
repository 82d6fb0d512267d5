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
_WALL: Final = 20  # times its processor time, which a structure may take on a machine that is busy


class Compiler:
    """One process, which compiles one structure at a time. To be used by one task at a time, and closed.

    vocabulary: the model's tokens, and what a structure may take.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.worker = WorkerProcess(COMPILE_MODULE, vocabulary, "structure", "compiles structures")

    async def compile(self, source: StructureSource) -> Answer:
        """What the process makes of a structure, or why it was ended.

        Raises ServiceError: FAILED_PRECONDITION where the model's tokens can't be used, UNAVAILABLE where no process
        can be started, and where one did not answer in time though it took little of the processor's, or was ended.
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
        """Ends the process. There is no other any more."""
        await self.worker.close()

    def _why(self, code: int) -> str:
        """What is wrong with the structure that has ended the process. Raises ServiceError where it was not that."""
        if code == -signal.SIGPROF:
            return f"takes more than {self._vocabulary.compile_s:g} s of processor time to be compiled"
        if code == -signal.SIGABRT:  # what the library does where it is refused memory
            return f"needs more than {self._vocabulary.memory_mb} MiB of memory to be compiled"
        if code == -signal.SIGSEGV:
            return "needs more of the stack than there is to be compiled"
        raise _unavailable("the process that compiled the request's structure was ended")


def _unavailable(sentence: str) -> ServiceError:
    return ServiceError("STRUCTURE_LOST", f"{sentence}; the request may be sent again")
