"""Runs the process that checks a checkpoint's files before the start."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.checkpoint.check_process import PROCESSOR_S, CheckAnswer, CheckOrder
from runahead.runtime.process_end import described
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes.interrupts import started

CHECK_MODULE: Final = "runahead.runtime.checkpoint.check_process"
COMMAND: Final = (sys.executable, "-P", "-m", CHECK_MODULE)
_WALL_S: Final = 600.0  # for slow disks; the process limits its own processor time


async def check_checkpoint(
    config: EngineConfig, command: Sequence[str] = COMMAND, *, has_tokenizer: bool = True
) -> int:
    """Check the model's and draft model's files and return `EngineConfig.tokenizer_vocab`, 0 without a tokenizer.

    Raises CheckpointError for files whose headers show that they can't be served, or that take too much time or memory.
    A cancelled call leaves no process behind.
    """
    order = CheckOrder(
        model=config.model,
        draft_model=config.draft_model if config.drafter == "model" else "",
        draft_head=config.draft_model if config.drafter == "eagle" else "",
        has_weights=config.load_format != "dummy",
        has_tokenizer=has_tokenizer,
    )
    process = await started(command)
    try:
        async with asyncio.timeout(_WALL_S):
            said, _ = await process.communicate(msgspec.json.encode(order))
    except TimeoutError:
        raise CheckpointError(f"{config.model} was not read within {_WALL_S:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    answer = _answer(process.returncode or 0, said, config)
    if answer.refused:
        raise CheckpointError(answer.refused)
    return answer.tokenizer_vocab


def _answer(code: int, said: bytes, config: EngineConfig) -> CheckAnswer:
    if code == -signal.SIGXCPU:
        return CheckAnswer(f"{config.model} takes over {PROCESSOR_S} s to be read, which no files of a model do")
    with suppress(msgspec.DecodeError):  # a truncated answer
        if code == 0:
            return msgspec.json.decode(said, type=CheckAnswer)
    return CheckAnswer(f"{config.model} can't be read: the process that looks at it ended with {described(code)}")
