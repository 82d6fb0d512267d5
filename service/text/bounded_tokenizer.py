"""A tokenizer with unknown regular expressions, run in processes with a time limit for each text.

A thread can't be ended while the library searches for a match; a process can. Its caller waits a bounded time, since
the process may be stopped or wait for a processor.
"""

from __future__ import annotations

import signal
from typing import Final

from runahead.runtime.process_end import described
from runahead.service.contract.errors import Violation, exhausted, invalid_argument, shutting_down
from runahead.service.text.tokenizer_process import MEMORY_BYTES, PROCESSOR_S, Answer, Ask, Description
from runahead.service.workers.worker_process import WorkerLostError, WorkerProcess

_MODULE: Final = "runahead.service.text.tokenizer_process"
_WALL_S: Final = 20 * PROCESSOR_S  # for an answer on a busy machine
_ANSWER_BYTES: Final = 1 << 30  # the most that a response may have


class BoundedTokenizer:
    """Used on one event loop, with a process for each of its concurrent calls. description: the text of
    `tokenizer.json`.
    """

    def __init__(self, description: str) -> None:
        self._description = Description(description)
        self.workers: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []  # the most recently used one last
        self._closed = False

    async def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokenize. Raises ServiceError for a text that takes too long or too much memory, or without a process."""
        return (await self._answer(Ask(text, (), add_special_tokens), "text")).ids

    async def decode(self, ids: tuple[int, ...], include_special_tokens: bool) -> str:
        """Detokenize. Raises ServiceError like `encode`."""
        return (await self._answer(Ask(None, ids, include_special_tokens), "token_ids")).text

    async def close(self) -> None:
        """End the processes for good."""
        self._closed = True
        for worker in self.workers:
            await worker.close()

    async def _answer(self, ask: Ask, field: str) -> Answer:
        if self._closed:
            raise shutting_down()
        worker = self._idle.pop() if self._idle else self._new_worker()
        try:
            answer = await worker.ask(ask, Answer, _WALL_S)
        except TimeoutError:
            sentence = f"a process that tokenizes did not answer within {_WALL_S:g} s"
            raise exhausted("TOKENIZING_LIMIT", sentence, 1.0) from None
        except WorkerLostError as error:
            raise exhausted("TOKENIZING_LIMIT", str(error), 1.0) from None
        finally:
            self._idle.append(worker)
        if answer == -signal.SIGPROF:
            sentence = f"{field} takes more than {PROCESSOR_S:g} s of processor time to be tokenized"
            raise invalid_argument([Violation(field, sentence)])
        if answer == -signal.SIGABRT:
            sentence = f"{field} takes more than {MEMORY_BYTES >> 20} MiB of memory to be tokenized"
            raise invalid_argument([Violation(field, sentence)])
        if isinstance(answer, int):
            raise RuntimeError(f"a process that tokenizes has ended with {described(answer)}")
        if answer.failed:
            raise RuntimeError("the tokenizer's library has failed")
        return answer

    def _new_worker(self) -> WorkerProcess:
        worker = WorkerProcess(_MODULE, self._description, "tokenizer", "tokenizes", answer_bytes=_ANSWER_BYTES)
        self.workers.append(worker)
        return worker
