"""Every module of ours is loaded under one name, and nothing of somebody else's is taken for one of ours. All tests are
collected once, which also shows that mutants name tests."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from runahead.runtime.log_output import LogOutput
from runahead.service.processes import children
from runahead.service.processes.children import ENGINE_COMMAND, ENGINE_MODULE, EngineProcess
from runahead.service.settings.settings import Settings, engine_config
from tests.mutants.tables import read_mutants

ROOT = Path(__file__).resolve().parents[1]
AT_THE_ROOT = ("cuda_graphs", "protos", "runtime", "service")  # folders that are not imported as what they are called

# What a target of the Makefile starts, with arguments that make it load what it has and end soon.
ARGUMENTS = {
    "benchmarks.bench": ["host-time", "--help"],
    "benchmarks.bundled_model.evaluate": ["--help"],
    "benchmarks.gpu_table": ["--list"],
    "benchmarks.load": ["--help"],
    "benchmarks.soak": ["--help"],
    "benchmarks.smollm2.demo": ["--help"],
    "benchmarks.smollm2.parity": ["--help"],
    "benchmarks.demo": [],  # a service, its engine, and clients
    "coverage": [
        "run",
        "--data-file={}/coverage",
        "-m",
        "pytest",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "tests/protos",
    ],
    "pytest": ["--collect-only", "-q", "-p", "no:cacheprovider", "tests"],
    "runahead": ["generate", "--help"],
    "tests.container": ["--help"],
    "tests.mutants": ["--help"],
    "tests.simulation": ["--seeds", "2", "--out={}"],
    "tests.simulation.long_run": ["--help"],
}
# These read our files, or copy them first and load the copy, whose names its own check compares.
TOOLS = {"buf", "lint-imports", "mutmut", "mypy", "pip", "ruff"}

# Runs at the end of every Python process whose PYTHONPATH leads to it.
WITNESS = """
import atexit, json, os, sys

def tell():
    # By module, since one may have a second name, as `__mp_main__` is `__main__`.
    modules = {id(module): (name, module) for name, module in reversed(sys.modules.items())}
    loaded = {name: getattr(module, "__file__", None) for name, module in modules.values()}
    place = os.path.join(os.environ["WITNESS"], str(os.getpid()))
    with open(place, "w") as file:
        json.dump({"arguments": sys.orig_argv, "modules": {name: path for name, path in loaded.items() if path}}, file)
    os.rename(place, place + ".json")  # whole, whenever the process is ended

atexit.register(tell)
"""


def entry_points() -> set[str]:
    """What the Makefile's targets run out of the virtual environment."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"\$\(BIN\)/(?:python -m )?(\w[\w.-]*)", makefile)) - {"python"}


class Ran(NamedTuple):
    """A command that succeeded. processes: of each of Python's, modules by name, with their files."""

    processes: list[dict[str, Path]]
    output: str


def ran(command: Sequence[str], folder: Path) -> Ran:
    (folder / "witness").mkdir()
    (folder / "sitecustomize.py").write_text(WITNESS)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "WITNESS": str(folder / "witness")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = [json.loads(file.read_text()) for file in (folder / "witness").glob("*.json")]
    processes = [{name: Path(file).resolve() for name, file in process["modules"].items()} for process in told]
    return Ran(processes, done.stdout)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All tests, collected and not run."""
    return ran([sys.executable, "-m", "pytest", *ARGUMENTS["pytest"]], tmp_path_factory.mktemp("collected"))


def is_ours(file: Path) -> bool:
    return file.is_relative_to(ROOT) and ".venv" not in file.relative_to(ROOT).parts


def names_of_files(modules: dict[str, Path]) -> dict[str, list[str]]:
    """Of our files that were loaded: under which names."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, file in modules.items():
        if is_ours(file):
            names[str(file.relative_to(ROOT))].append(name)
    return names


def test_every_entry_point_of_the_makefile_is_run_here_or_is_a_tool() -> None:
    assert entry_points() == {*ARGUMENTS, *TOOLS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("entry", sorted(ARGUMENTS))
def test_an_entry_point_loads_each_file_once_and_under_one_name(
    entry: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if entry == "pytest":
        processes = request.getfixturevalue("collected").processes
    else:
        runahead = str(Path(sys.executable).parent / "runahead")
        start = [runahead] if entry == "runahead" else [sys.executable, "-m", entry]
        processes = ran([*start, *(argument.format(tmp_path) for argument in ARGUMENTS[entry])], tmp_path).processes
    files: set[str] = set()
    for modules in processes:
        names = names_of_files(modules)
        files |= names.keys()
        assert not {file: several for file, several in names.items() if len(several) > 1}
        assert not {name for name in modules if name.partition(".")[0] in AT_THE_ROOT and is_ours(modules[name])}
    assert any(file.endswith(".py") for file in files), "the witness has seen code of ours"
    if entry == "benchmarks.demo":
        engine = str(Path(importlib.util.find_spec(ENGINE_MODULE).origin or "").relative_to(ROOT))  # type: ignore[union-attr]
        assert {"service/processes/server.py", engine} <= files, "the service and its engine are among the processes"


def test_every_parameter_that_a_mutant_names_is_there(collected: Ran) -> None:
    named = {test for mutant in read_mutants() for test in mutant.tests if test.endswith("]")}
    assert named and sorted(named - set(collected.output.splitlines())) == []


def test_a_file_that_is_loaded_twice_is_seen(tmp_path: Path) -> None:
    """What the test above looks for, on a process that does it."""
    program = "import sys; sys.path.insert(0, '.'); import service.contract.limits, runahead.service.contract.limits"
    (modules,) = ran([sys.executable, "-c", program], tmp_path).processes
    assert sorted(names_of_files(modules)["service/contract/limits.py"]) == [
        "runahead.service.contract.limits",
        "service.contract.limits",
    ]


def test_a_process_that_is_killed_while_it_tells_is_left_out(tmp_path: Path) -> None:
    """A pool of workers does so to those that are still there when the work is done."""
    tells_half = "(file.write('{'), file.flush(), os.kill(os.getpid(), signal.SIGKILL))"
    killed = f"import json, os, signal; json.dump = lambda what, file: {tells_half}"
    program = f"import subprocess, sys; assert subprocess.run([sys.executable, '-c', {killed!r}]).returncode == -9"
    assert len(ran([sys.executable, "-c", program], tmp_path).processes) == 1


def test_the_engines_process_is_named_once_and_the_name_resolves() -> None:
    spec = importlib.util.find_spec(ENGINE_MODULE)
    assert spec is not None and spec.origin is not None
    assert list(ENGINE_COMMAND) == [sys.executable, "-P", "-m", ENGINE_MODULE]
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    assert any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body), "it can be run"
    folders = (ROOT / folder for folder in ("benchmarks", "cuda_graphs", "runtime", "service", "tests"))
    texts = {path: path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")}
    naming = [
        str(path.relative_to(ROOT))
        for path, text in texts.items()
        if ENGINE_MODULE.partition("runtime.")[2] in text  # most files need not be parsed
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value == ENGINE_MODULE
    ]
    assert naming == [str(Path(children.__file__).relative_to(ROOT))]


@pytest.fixture
def folder_with_stand_ins(tmp_path: Path) -> Path:
    """A folder with packages and a module that are called as ours and the standard library's are."""
    for name in ("cuda_graphs", "runahead", "runtime", "service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was taken from the current folder')\n")
    (tmp_path / "queue.py").write_text("raise SystemExit('queue was taken from the current folder')\n")
    return tmp_path


def test_nothing_in_the_current_folder_stands_in_for_a_module_of_the_engine(
    folder_with_stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_with_stand_ins)
    unsafe = [argument for argument in ENGINE_COMMAND if argument != "-P"]
    done = subprocess.run(unsafe, input="", capture_output=True, text=True, timeout=60)
    assert "was taken from the current folder" in done.stderr, "without -P something does"

    async def start_and_stop() -> int:
        engine = await EngineProcess.start(engine_config(Settings()), LogOutput())
        return await engine.stop(grace_s=30)

    assert asyncio.run(start_and_stop()) == 0


def test_the_command_serves_from_a_folder_with_stand_ins(folder_with_stand_ins: Path) -> None:
    command = shutil.which("runahead", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run(
        [command, "serve", "--help"], cwd=folder_with_stand_ins, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--run-ahead" in done.stdout, done.stderr
