"""What a shell offers after `runahead completion SHELL`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from runahead.service import cli
from runahead.service.commands.shell_completion import SHELLS


@pytest.fixture
def script(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    assert cli.main(["completion", request.param]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    return path


def offered(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words of a command line."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f'source "{script}"; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_runahead runahead "" ""'
    command = ["bash", "--norc", "-c", asked + "; printf '%s\\n' \"${COMPREPLY[@]}\""]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


bash = pytest.mark.parametrize("script", ["bash"], indirect=True)


@bash
def test_bash_offers_commands(script: Path) -> None:
    assert offered(script, "runahead", "") >= {"serve", "generate", "chat", "stats", "abort", "completion"}
    assert offered(script, "runahead", "com") == {"completion"}


@bash
def test_bash_offers_the_flags_of_a_command(script: Path) -> None:
    assert offered(script, "runahead", "serve", "--run-a") == {"--run-ahead", "--run-ahead-tokens"}
    assert offered(script, "runahead", "serve", "--no-pre") == {"--no-prefix-cache"}
    assert offered(script, "runahead", "generate", "--top") == {"--top-k", "--top-p"}
    assert offered(script, "runahead", "chat", "--s") == {"--seed", "--stop", "--stop-token-ids", "--system"}


@bash
def test_bash_offers_the_values_of_a_flag(script: Path) -> None:
    assert offered(script, "runahead", "serve", "--device", "") == {"auto", "cpu", "cuda"}
    assert offered(script, "runahead", "serve", "--run-ahead", "") == {"auto", "serial", "1", "2", "3", "4"}
    assert offered(script, "runahead", "completion", "") == set(SHELLS)


@bash
def test_bash_offers_files_and_folders_where_a_flag_takes_one(script: Path) -> None:
    (script.parent / "models").mkdir()
    assert offered(script, "runahead", "serve", "--config", "scr") == {"script"}
    assert {name.rstrip("/") for name in offered(script, "runahead", "serve", "--model", "")} == {"models", "script"}


@pytest.mark.parametrize("script", SHELLS, indirect=True)
def test_test_modes_are_not_offered(script: Path) -> None:
    text = script.read_text()
    assert "shutdown-grace-s" in text
    assert "jitter" not in text and "counters" not in text


@pytest.mark.parametrize(("script", "shell"), [(shell, shell) for shell in SHELLS], indirect=["script"])
def test_each_shell_can_read_its_script(script: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=60)
