"""A wheel, installed in an environment of its own with the sources gone, serves and generates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.local_service import BESIDE
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.mutants.trial import copied_tree, files_of_the_tree

pytestmark = pytest.mark.timeout(300)

START_S = 120.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, which is gone when a test begins. Nothing is fetched."""
    place = tmp_path_factory.mktemp("wheel")
    with copied_tree([path for path in files_of_the_tree() if path.parts[0] not in ("benchmarks", "tests")]) as sources:
        # Without isolation: what the build needs is among the requirements of the tests.
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        done = subprocess.run([*command, "--wheel-dir", str(place), str(sources)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's programs. It has the wheel, and sees the dependencies that this one has."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place)
    command = [sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "install", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--no-index", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # Behind its own, and only now, so that pip takes nothing there for its own. Files .pth in that folder, by which a
    # package installed in place is found, are not read.
    own = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somebody's own: with a `service`, a `runtime` and a `queue.py` that must not be run."""
    for name in ("cuda_graphs", "runahead", "runtime", "service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was taken from the current folder')\n")
    (tmp_path / "queue.py").write_text("raise SystemExit('queue was taken from the current folder')\n")
    return tmp_path


def variables() -> dict[str, str]:
    """Of this process, without those that lead a Python to other modules."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RUNAHEAD_"))}


@pytest.fixture
def url(environment: Path, folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "service.log"
    with log.open("wb") as output:
        service = subprocess.Popen(
            [str(environment / "runahead"), "serve", "--port", str(port), *BESIDE],
            cwd=folder,
            env=variables(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked = health.Watch(health_pb2.HealthCheckRequest(), timeout=START_S, wait_for_ready=True)
            try:
                assert any(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in asked)
            except grpc.RpcError as error:
                raise AssertionError(log.read_text()) from error
        yield f"127.0.0.1:{port}"
        service.terminate()
        assert service.wait(60) == 0, log.read_text()
    finally:
        service.kill()
        service.wait()


def test_a_wheel_puts_one_package_into_an_environment_and_nothing_generic(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"runahead"}
    assert {"runahead/v1/generate_pb2.py", "runahead/py.typed"} <= names
    bundled = {name.rpartition("/")[2] for name in names if name.startswith("runahead/runtime/models/bundled/")}
    assert bundled == {path.name for path in BUNDLED_FOLDER.rglob("*") if path.is_file()}
    head = {"runahead/runtime/models/bundled/draft_head/" + name for name in ("config.json", "model.safetensors")}
    assert head <= names, "a drafter without a folder of its own needs it"
    hybrid = {f"runahead/runtime/models/bundled/hybrid/{path.name}" for path in (BUNDLED_FOLDER / "hybrid").iterdir()}
    assert len(hybrid) == 6 and hybrid <= names


def test_a_wheel_serves_and_generates_from_somebodys_own_folder(environment: Path, folder: Path, url: str) -> None:
    command = [str(environment / "runahead"), "generate", "def read_lines(path):", "--url", url]
    flags = ["--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run([*command, *flags], cwd=folder, env=variables(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_wheel_runs_as_a_module_and_says_its_version(environment: Path, folder: Path) -> None:
    number = metadata.version("runahead-server")
    for arguments in (
        ["-m", "runahead", "--version"],
        ["-c", "import runahead; print('runahead', runahead.__version__)"],
    ):
        command = [str(environment / "python"), "-P", *arguments]
        done = subprocess.run(command, cwd=folder, env=variables(), capture_output=True, text=True, check=True)
        assert done.stdout == f"runahead {number}\n", "its sources were no checkout"


def test_what_was_served_is_the_wheel(environment: Path) -> None:
    program = (
        "from runahead import cuda_graphs, service, v1\nfrom runahead.runtime import models\nprint(models.__path__[0])"
    )
    command = [str(environment / "python"), "-P", "-c", program]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(environment.parent)
