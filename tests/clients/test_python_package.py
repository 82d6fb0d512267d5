"""`runahead-client`: the stubs as a package of their own, beside the server's or without it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import runahead.v1
from benchmarks.local_service import local_service
from tests.clients.clean_environment import NEEDED, clean_environment, client_wheel
from tests.project.repository import ROOT

pytestmark = pytest.mark.timeout(300)

PROJECT = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(scratch: Path) -> Path:
    return client_wheel(scratch)


def files(wheel: Path) -> dict[str, str]:
    """Modules and their texts."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" not in name}


def ran(python: Path | str, program: str, path: Path | None = None) -> str:
    """What a program prints. path: a folder whose packages it finds, too."""
    lines = f"import sys\nsys.path.append({str(path)!r})\n" if path else ""
    command = [str(python), "-I", "-c", lines + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_stubs_are_imported_where_there_is_no_server_and_no_torch(scratch: Path) -> None:
    program = (
        "import importlib.util, json, sys\n"
        "import runahead_client.v1\n"
        "absent = [name for name in ('runahead', 'torch', 'numpy') if importlib.util.find_spec(name) is None]\n"
        "loaded = {name.partition('.')[0] for name, module in sys.modules.items() if getattr(module, '__file__', '')}\n"
        "print(json.dumps([absent, sorted(loaded)]))"
    )
    absent, loaded = json.loads(ran(clean_environment(scratch), program))
    assert absent == ["runahead", "torch", "numpy"]
    others = {name for name in loaded if not name.startswith("_")} - set(sys.stdlib_module_names)
    assert others <= {"google", "grpc", "runahead_client", "typing_extensions", "sitecustomize"}


def test_the_package_asks_for_grpcio_and_protobuf_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        told = message_from_bytes(archive.read(name))
    asked = told.get_all("Requires-Dist") or []
    assert sorted(line for line in asked if "extra ==" not in line) == ["grpcio>=1.83.2", "protobuf>=7.35.1"]
    names = {
        line.partition(">=")[0] for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["status"]]
    }
    assert names <= set(NEEDED)
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert told["Version"] == root["version"]


def test_no_file_is_where_the_server_has_one(wheel: Path) -> None:
    """So either can be installed and removed, in whatever order and version, and the other stays whole."""
    assert {name.partition("/")[0] for name in files(wheel)} == {"runahead_client"}


def test_every_stub_is_there_and_says_that_it_is_the_clients(wheel: Path) -> None:
    modules = files(wheel)
    for proto in (ROOT / "protos/runahead/v1").glob("*.proto"):
        for ending in (".proto", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            assert f"runahead_client/v1/{proto.stem}{ending}" in modules
    assert "runahead_client/py.typed" in modules
    for name, text in modules.items():
        if not name.endswith(".proto"):
            assert "from runahead." not in text and "import runahead." not in text, name
            assert "'runahead.v1." not in text.replace("'runahead.v1.GenerationService'", ""), name
    assert "'/runahead.v1.GenerationService/Generate'" in modules["runahead_client/v1/generation_service_pb2_grpc.py"]


def test_the_bench_of_the_package_measures_a_service_without_the_servers_package(scratch: Path) -> None:
    command = clean_environment(scratch).parent / "runahead-bench"
    with local_service(["--threads", "1", "--num-blocks", "300"]) as service:
        flags = ["--url", service.url, "--rate", "0", "--requests", "3", "--prompt-tokens", "9", "--output-tokens", "4"]
        done = subprocess.run([str(command), *flags, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["requests"], found["failed"]) == (3, 0)
    assert found["tokens"] == found["wanted_tokens"] > 0


def test_both_packages_live_in_one_process(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for first, second in (("runahead", "runahead_client"), ("runahead_client", "runahead")):
        program = (
            f"import {first}.v1, {second}.v1\n"
            f"request = {first}.v1.GenerateRequest(text='x')\n"
            f"again = {second}.v1.GenerateRequest.FromString(request.SerializeToString())\n"
            f"print({first}.v1.__all__ == {second}.v1.__all__, again.text, type(again).__module__)"
        )
        assert ran(sys.executable, program, tmp_path).split()[:2] == ["True", "x"]


def test_the_package_exports_what_the_servers_does(wheel: Path) -> None:
    exported = files(wheel)["runahead_client/v1/__init__.py"]
    assert all(f'"{name}"' in exported for name in runahead.v1.__all__)
