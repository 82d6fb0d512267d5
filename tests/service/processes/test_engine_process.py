"""The engine as a child process: its orders, its folder, its end, and the server's exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.local_service import BESIDE
from runahead.runtime.log_output import LogOutput
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.service.processes import server, socket_folder
from runahead.service.processes.children import EngineProcess, EngineStartError
from runahead.service.processes.server import run
from runahead.service.settings.server_config import EXIT_CANNOT_START, ServerConfig, check_server_config
from runahead.service.settings.settings import FrontEndSettings
from tests.service.small_tokenizers import byte_level_tokenizer

CONFIG = EngineConfig(model="/nowhere")
LOG = LogOutput(level="warning", format="json")


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], list[str]]:
    """A command that runs a body as the engine; it finds the first line of its input, parsed, in `orders`."""

    def write(body: str) -> list[str]:
        script = tmp_path / "engine.py"
        script.write_text(f"import json, sys, threading\norders = json.loads(sys.stdin.readline())\n{body}\n")
        return [sys.executable, str(script)]

    return write


def test_the_engine_gets_its_orders_and_a_private_folder(tmp_path: Path, command: Callable[[str], list[str]]) -> None:
    written = tmp_path / "orders.json"
    body = f"open({str(written)!r}, 'w').write(json.dumps(orders))\nprint('ready', flush=True)\nsys.stdin.read()"

    async def start_and_stop() -> None:
        engine = await EngineProcess.start(CONFIG, LOG, command(body))
        orders = json.loads(written.read_text())
        assert orders["socket"] == str(engine.socket)
        assert orders["log"] == {"level": "warning", "format": "json"}
        assert orders["config"]["model"] == "/nowhere" and orders["config"]["run_ahead"] == CONFIG.run_ahead
        assert stat.S_IMODE(engine.socket.parent.stat().st_mode) == 0o700
        assert await engine.stop(grace_s=10) == 0, "the end of its input ends it"
        assert not engine.socket.parent.exists()

    asyncio.run(start_and_stop())


LISTEN = """
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(orders["socket"])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["x" * 120, os.fsdecode(b"\xff")], ids=["too long", "not UTF-8"])
def test_a_temporary_folder_that_no_socket_fits_into_is_passed_over(
    name: str, tmp_path: Path, command: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unfit = tmp_path / name
    unfit.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(unfit))

    async def start_and_stop() -> Path:
        engine = await EngineProcess.start(CONFIG, LOG, command(LISTEN))
        folder = engine.socket.parent
        assert engine.socket.is_socket()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert await engine.stop(grace_s=10) == 0
        return folder

    folder = asyncio.run(start_and_stop())
    assert not folder.exists() and not list(unfit.iterdir())
    assert unfit not in folder.parents


def test_where_no_socket_fits_a_sentence_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(socket_folder, "_SHORT_FOLDERS", (str(tmp_path / "absent"),))
    with pytest.raises(ConfigError, match=r"xxx.*longer than 103 bytes.*absent can't be written to; set TMPDIR"):
        asyncio.run(EngineProcess.start(CONFIG, LOG, ["false"]))
    assert not list(long.iterdir())


def test_an_engine_that_can_not_start_gives_its_exit_code(command: Callable[[str], list[str]]) -> None:
    with pytest.raises(EngineStartError) as failed:
        asyncio.run(EngineProcess.start(CONFIG, LOG, command("sys.exit(2)")))
    with pytest.raises(EngineStartError, match="signal SIGBUS"):
        asyncio.run(EngineProcess.start(CONFIG, LOG, command("import os; os.kill(os.getpid(), 7)")))
    assert failed.value.exit_code == 2


def test_an_engine_that_does_not_end_is_killed(command: Callable[[str], list[str]]) -> None:
    body = "print('ready', flush=True)\nthreading.Event().wait()"

    async def start_and_stop() -> int:
        return await (await EngineProcess.start(CONFIG, LOG, command(body))).stop(grace_s=0.05)

    assert asyncio.run(start_and_stop()) == -9


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path, command: Callable[[str], list[str]]) -> None:
    written = tmp_path / "pid"
    os.mkfifo(written)
    body = f"import os\nopen({str(written)!r}, 'w').write(str(os.getpid()))\nthreading.Event().wait()"

    async def start_and_cancel() -> int:
        starting = asyncio.ensure_future(EngineProcess.start(CONFIG, LOG, command(body)))
        pid = int(await asyncio.to_thread(written.read_text))
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return pid

    pid = asyncio.run(start_and_cancel())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_a_loopback_host_needs_no_permission(host: str) -> None:
    check_server_config(ServerConfig(CONFIG, FrontEndSettings(host=host)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_any_other_host_needs_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        check_server_config(ServerConfig(CONFIG, FrontEndSettings(host=host)))
    check_server_config(ServerConfig(CONFIG, FrontEndSettings(host=host, insecure=True)))


def test_a_tokenizer_is_the_checkpoints_or_none() -> None:
    check_server_config(ServerConfig(CONFIG, FrontEndSettings(tokenizer="none")))
    with pytest.raises(ConfigError, match="tokenizer must be auto or none, and is 'elsewhere'"):
        check_server_config(ServerConfig(CONFIG, FrontEndSettings(tokenizer="elsewhere")))  # type: ignore[arg-type]


def test_an_impossible_setting_of_the_engine_is_named() -> None:
    with pytest.raises(ConfigError, match="run_ahead"):
        check_server_config(ServerConfig(engine=EngineConfig(model="x", run_ahead=9)))


def test_a_model_without_a_tokenizer_exits_2_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    done = serve(tmp_path, port=0)
    assert done.returncode == EXIT_CANNOT_START
    assert done.stderr.splitlines()[-1].startswith("runahead serve: ")
    assert "tokenizer.json is missing: a checkpoint needs its tokenizer beside it; `python -c" in done.stderr
    assert done.stderr.endswith("; --tokenizer none serves it for token ids only\n")


def test_a_port_in_use_exits_2_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve(tmp_path, port)
    assert done.returncode == EXIT_CANNOT_START
    said = f"runahead serve: 127.0.0.1 port {port} can't be listened on: Address already in use; "
    assert done.stderr == f"{said}port takes another number, or 0 for any free port\n"


def test_a_host_that_is_no_name_exits_2_with_a_sentence(tmp_path: Path) -> None:
    done = serve(tmp_path, 0, host="a..b", insecure=True)
    assert done.returncode == EXIT_CANNOT_START
    assert done.stderr == "runahead serve: host 'a..b' is not a host name or address\n"


def serve(model: Path, port: int, **options: object) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys\nfrom runahead.runtime.wire.engine_config import EngineConfig\n"
        "from runahead.service.processes.server import run\n"
        "from runahead.service.settings.server_config import ServerConfig\n"
        "from runahead.service.settings.settings import FrontEndSettings\n"
        f"front_end = FrontEndSettings(port=int(sys.argv[2]), **{options!r})\n"
        "sys.exit(run(ServerConfig(EngineConfig(model=sys.argv[1], device='cpu'), front_end)))"
    )
    command = [sys.executable, "-c", program, str(model), str(port)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flags", "environment", "called"),
    [
        (["--context-length", "2049"], {}, "--context-length"),
        ([], {"RUNAHEAD__CONTEXT_LENGTH": "2049"}, "RUNAHEAD__CONTEXT_LENGTH"),
    ],
    ids=["flag", "variable"],
)
def test_the_engine_s_own_refusal_calls_a_setting_what_the_user_called_it(
    flags: list[str], environment: dict[str, str], called: str
) -> None:
    command = [sys.executable, "-m", "runahead", "serve", "--port", "0", *BESIDE, *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == EXIT_CANNOT_START
    assert done.stderr.splitlines()[1] == f"{called} (2049) is more than the model's 2048"


NO_CONFIG = r"/ckpt is no checkpoint: it has no config\.json; .*"
NO_WEIGHTS = r"/ckpt has neither model\.safetensors nor model\.safetensors\.index\.json; .*"
CUT_OFF = r"/ckpt/model\.safetensors is truncated or no safetensors file: its header is incomplete; .*"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, NO_CONFIG),
        ({"config.json": b"{"}, r"/ckpt/config\.json can't be read as JSON: .*"),
        ({"config.json": b"{}"}, NO_WEIGHTS),
        ({"config.json": b"{}", "model.safetensors": b"1234"}, CUT_OFF),
    ],
    ids=["no config", "config", "no weights", "weights"],
)
def test_a_checkpoint_with_files_missing_or_cut_off_is_refused_before_an_engine_is_started(
    files: dict[str, bytes],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def start(*_: object) -> None:
        pytest.fail("an engine was started")

    monkeypatch.setattr(EngineProcess, "start", start)
    monkeypatch.setattr(server, "configure_logs", lambda output: None)
    folder = tmp_path / "ckpt"
    folder.mkdir()
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert run(ServerConfig(EngineConfig(model=str(folder)), FrontEndSettings(port=0))) == EXIT_CANNOT_START
    assert re.fullmatch(f"runahead serve: .*{sentence}\n", capsys.readouterr().err)
