"""Rules of the repository that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from service.settings import Settings, setting_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cuda_graphs", "runtime", "service")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if not GENERATED.search(path.name))


def names_used(path: Path) -> set[str]:
    """Imported modules, and attributes as `module.name`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


def modules_after(statement: str) -> set[str]:
    """Modules that a fresh interpreter holds after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_pure_modules_load_neither_torch_nor_a_loop_nor_a_logger() -> None:
    loaded = modules_after("import runtime.scheduler, runtime.ledger, runtime.block_pool")
    assert "runtime.ledger" in loaded
    assert not loaded & {"torch", "asyncio", "structlog", "grpc"}


@pytest.mark.parametrize("module", ["service.cli", "service.settings", "service.generate", "service.server"])
def test_the_front_end_never_loads_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert "torch" not in loaded


def test_a_client_that_installs_the_package_imports_the_contract() -> None:
    loaded = modules_after("import os; os.chdir('/')\nimport runahead.v1.generation_service_pb2_grpc")
    assert {"runahead.v1", "runahead.v1.generate_pb2", "runahead.v1.generation_service_pb2_grpc"} <= loaded
    assert not loaded & {"service", "runtime", "torch"}


def test_only_the_settings_read_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES)
        if names_used(path) & {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    }
    assert readers == {"service/settings.py"}


def test_nothing_can_run_code_from_data() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load", "multiprocessing.connection"}
    offenders = {str(path.relative_to(ROOT)): names_used(path) & unsafe for path in sources(*PACKAGES, "benchmarks")}
    assert not {path: names for path, names in offenders.items() if names}


def test_no_source_file_is_longer_than_400_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(*PACKAGES, "benchmarks", "tests")
    }
    assert not {path: lines for path, lines in lengths.items() if lines > 400}


def test_the_pins_of_the_build_are_those_of_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for requirement in project["build-system"]["requires"]:
        assert requirement in constraints


def test_every_dependency_is_pinned_by_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert {re.split(r"[<>=\[]", requirement)[0] for requirement in wanted} <= pinned


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))


def test_no_property_test_has_a_time_limit() -> None:
    """A slow machine must not fail one."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    limits = {
        str(path.relative_to(ROOT)): ast.unparse(keyword.value)
        for path in sources("tests", "benchmarks")
        for call in calls(path)
        for keyword in call.keywords
        if keyword.arg == "deadline" and ast.unparse(keyword.value) != "None"
    }
    assert limits == {}


def test_the_readme_lists_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| `(RUNAHEAD_[A-Z_]+)` \| ([^|]*)\|", (ROOT / "README.md").read_text(), re.M)
    hidden = {"jitter_seed", "counters_from"}  # test modes
    defaults = {field: getattr(Settings(), field) for field in setting_names() if field not in hidden}
    listed = {flag.replace("-", "_"): (variable, default.strip("` ")) for flag, variable, default in rows}
    assert set(listed) == set(defaults)
    for name, (variable, shown) in listed.items():
        assert variable == "RUNAHEAD_" + name.upper()
        assert shown == str(defaults[name]).lower()
