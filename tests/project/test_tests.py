"""Rules about tests."""

from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import HealthCheck, settings

from tests.project.repository import ROOT, TESTS, TOOLS, calls, name_of, names_used, parsed, sources


def test_no_property_test_has_a_time_limit() -> None:
    """A slow machine must not fail one."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    limits = {
        name_of(path): ast.unparse(keyword.value)
        for path in sources(*TESTS, *TOOLS)
        for call in calls(path)
        for keyword in call.keywords
        if keyword.arg == "deadline" and ast.unparse(keyword.value) != "None"
    }
    assert limits == {}


def asked_of(name: str, path: Path) -> set[str]:
    """Attributes of whatever a file calls by this name."""
    return {used.partition(".")[2] for used in names_used(path) if used.startswith(f"{name}.")}


def has(made: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """Names that a class gives its instances, or one that it is made of."""
    found = {each.name for each in made.body if isinstance(each, ast.FunctionDef)}
    for each in made.body:
        targets = (
            each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(each, ast.AnnAssign) else []
        )
        found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    found |= {
        each.attr
        for each in ast.walk(made)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    of_others = (has(known[base.id], known) for base in made.bases if isinstance(base, ast.Name) and base.id in known)
    return found.union(*of_others)


def test_what_stands_in_for_a_cuda_device_has_all_that_a_start_asks_of_one() -> None:
    """No test of a start meets the real one without a GPU. What says what it has `taken`, and is closed, is one."""
    asked = asked_of("device", ROOT / "runtime" / "process" / "cuda.py")
    assert {"taken", "hold_memory", "close"} <= asked
    devices = (ROOT / "cuda_graphs" / name for name in ("host_device.py", "cuda_device.py"))
    classes = [(path, each) for path in (*sources(*TESTS), *devices) for each in parsed(path).body]
    made = {f"{name_of(path)}: {each.name}": each for path, each in classes if isinstance(each, ast.ClassDef)}
    known = {each.name: each for each in made.values()}
    devices_of_a_start = {
        where: has(each, known) for where, each in made.items() if {"taken", "close"} <= has(each, known)
    }
    assert len(devices_of_a_start) > 3
    assert {where: asked - names for where, names in devices_of_a_start.items() if not asked <= names} == {}
