"""A checkpoint's files are looked at by a process that may be lost."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from runahead.runtime.checkpoint import BUNDLED_FOLDER, BUNDLED_HEAD, CheckpointError
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes import checkpoint_check
from runahead.service.processes.checkpoint_check import check_checkpoint

CHECK = "from runahead.runtime.checkpoint import check_process as check\n"


def check(config: EngineConfig, program: str | None = None) -> None:
    command = checkpoint_check.COMMAND if program is None else (sys.executable, "-P", "-c", program)
    asyncio.run(check_checkpoint(config, command))


def refused(config: EngineConfig, program: str | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        check(config, program)
    return str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(model=str(BUNDLED_FOLDER)),
        EngineConfig(model=str(BUNDLED_FOLDER), drafter="eagle", draft_model=str(BUNDLED_HEAD)),
        EngineConfig(model=str(BUNDLED_FOLDER), drafter="model", draft_model=str(BUNDLED_FOLDER)),
    ],
    ids=["alone", "with a head", "with a draft model"],
)
def test_files_that_can_be_served_pass(config: EngineConfig) -> None:
    check(config)


@pytest.mark.parametrize("drafter", ["none", "eagle", "model"])
def test_what_is_wrong_with_a_file_is_said_in_its_own_sentence(drafter: Any, tmp_path: Path) -> None:
    model = str(tmp_path if drafter == "none" else BUNDLED_FOLDER)
    config = EngineConfig(model=model, drafter=drafter, draft_model=str(tmp_path))
    assert str(tmp_path) in refused(config) and "config.json" in refused(config)


def test_weights_are_not_looked_at_where_none_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check(EngineConfig(model=str(tmp_path), load_format="dummy"))
    assert "has neither model.safetensors" in refused(EngineConfig(model=str(tmp_path)))


def test_files_that_take_too_much_memory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [' + "[]," * 5_000_000 + "0]}")
    sentence = refused(EngineConfig(model=str(tmp_path)), f"{CHECK}check.MEMORY_BYTES = 200 << 20\ncheck.main()")
    assert sentence.startswith(f"{tmp_path} takes over 200 MiB of memory to be read")


def test_files_that_take_too_much_time_are_refused_and_the_process_is_gone(tmp_path: Path) -> None:
    endless = f"{CHECK}check.PROCESSOR_S = 1\ncheck.check_files = lambda *_, **__: [None for _ in iter(int, 1)]\n"
    sentence = refused(EngineConfig(model=str(tmp_path)), f"{endless}check.main()")
    assert sentence.startswith(f"{tmp_path} takes over 60 s to be read")


def test_a_reader_that_fails_in_an_unforeseen_way_is_a_sentence(tmp_path: Path) -> None:
    failing = f"{CHECK}def fail(*_, **__):\n    raise RecursionError('x' * 10000)\ncheck.check_files = fail\n"
    sentence = refused(EngineConfig(model=str(tmp_path)), f"{failing}check.main()")
    assert sentence.startswith(f"{tmp_path} can't be read: RecursionError: xxx") and len(sentence) < 2010


def test_a_process_that_dies_is_a_sentence(tmp_path: Path) -> None:
    sentence = refused(EngineConfig(model=str(tmp_path)), "import os; os._exit(7)")
    assert sentence == f"{tmp_path} can't be read: the process that looks at it ended with exit code 7"


@pytest.mark.parametrize(
    ("program", "end"),
    [("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"), ("print('{')", "exit code 0")],
)
def test_a_process_that_is_killed_or_cut_off_is_a_sentence_of_its_own(tmp_path: Path, program: str, end: str) -> None:
    sentence = refused(EngineConfig(model=str(tmp_path)), program)
    assert sentence == f"{tmp_path} can't be read: the process that looks at it ended with {end}"


def test_a_check_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = (
        f"import os, time\nwith open({str(pipe)!r}, 'w') as pipe:\n    pipe.write(str(os.getpid()))\ntime.sleep(600)"
    )

    async def cancelled() -> str:
        task = asyncio.create_task(check_checkpoint(EngineConfig(model="m"), (sys.executable, "-c", program)))
        pid = await asyncio.to_thread(pipe.read_text)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    assert not Path(f"/proc/{asyncio.run(cancelled())}").exists()
