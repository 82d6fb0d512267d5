"""Steps of deploy/container/install.sh that refuse. That they install, `make container` shows."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.container.steps import SCRIPTS
from tests.project.repository import ROOT


def install(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", SCRIPTS / "install.sh", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100)


def wheel(folder: Path, name: str, version: str) -> None:
    """One that pip can choose: a name and a version."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")


def pinned_torch() -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = (line.partition("==")[2] for line in lines if line.startswith("torch=="))
    return pinned


def test_wheels_for_cpus_refuse_a_torch_that_is_built_for_cuda(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    wheel(there, "torch", pinned_torch())
    done = install(
        "wheels",
        "cpu",
        ROOT,
        tmp_path / "wheels",
        PYTHON=sys.executable,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(there),
        PIP_CONFIG_FILE=os.devnull,
    )
    assert done.returncode == 1
    assert f"pip finds no torch=={pinned_torch()}+cpu" in done.stderr
    assert "PIP_EXTRA_INDEX_URL" in done.stderr
    assert not list((tmp_path / "wheels").iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a step: system, tools, wheels, package or compiler"),
        (["wheel"], "there is no step 'wheel' with 0 arguments"),
        (["package"], "there is no step 'package' with 0 arguments"),
        (["wheels", "tpu", ROOT, "/nowhere"], "wheels are for 'cpu' or 'cuda', not for 'tpu'"),
        (["package", "/nowhere"], "no wheel of runahead is in '/nowhere'"),
    ],
)
def test_a_step_that_can_not_be_is_refused_before_anything_is_done(arguments: list[str], sentence: str) -> None:
    done = install(*arguments)
    assert done.returncode == 1
    assert done.stderr == f"install.sh: {sentence}\n"
