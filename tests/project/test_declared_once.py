"""A sampling parameter, a setting and a counter are declared in one place, and adding one touches the few files that a
document names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from runahead.runtime import row_record
from runahead.runtime.engine.engine_stats import COUNTED
from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.row_record import RowParameters
from runahead.runtime.wire.engine_config import EngineSettings
from runahead.runtime.wire.setting import settings_of
from runahead.service.settings.settings import SETTINGS, FrontEndSettings
from tests.project.repository import PACKAGES, ROOT, name_of, parsed, sources

MOST_FILES: Final = 8
DECLARES: Final = ("Meta", "setting", "_port_setting")  # what makes a setting's bounds and description
# Those that nothing but the sampler looks at.
PLAIN: Final = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
SAMPLER: Final = "runtime/kernels/triton/sampling/"  # one place: the kernels that a parameter means something to


@cache
def names_in(path: Path) -> frozenset[str]:
    """Identifiers of a file, and its strings."""
    words = (
        getattr(node, attribute, None)
        for node in ast.walk(parsed(path))
        for attribute in ("id", "attr", "arg", "value")
    )
    return frozenset(word for word in words if isinstance(word, str))


def files_to_add(what: str) -> set[str]:
    """Files that docs/architecture.md says are touched to add something."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"## To add {what}\n")[1].split("\n## ")[0]
    steps = [line for line in section.splitlines() if re.match(r"\d\. |   ", line)]
    return set(re.findall(r"`([a-z_/]+\.py)`", "\n".join(steps)))


@pytest.mark.parametrize("what", ["a sampling parameter", "a setting", "a counter"])
def test_the_document_names_files_that_are_there(what: str) -> None:
    assert files_to_add(what)
    assert not [path for path in files_to_add(what) if not (ROOT / path).is_file()]


@pytest.mark.parametrize("name", PLAIN)
def test_a_sampling_parameter_stands_in_the_files_of_the_document_and_in_few_of_them(name: str) -> None:
    files = {name_of(path) for path in sources(*PACKAGES) if name in names_in(path)}
    files -= {"service/commands/bench/calls.py"}  # whose requests are greedy, whatever parameters there are
    assert files <= files_to_add("a sampling parameter")
    assert name_of(Path(row_record.__file__)) in files
    assert len({SAMPLER if file.startswith(SAMPLER) else file for file in files}) <= MOST_FILES, sorted(files)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_filter_stands_in_the_oracle_and_the_simulator_s_files_of_the_document(name: str) -> None:
    tests = [*sources("tests/simulation"), ROOT / "tests" / "runtime" / "kernels" / "sampling_oracle.py"]
    files = {name_of(path) for path in tests if not path.name.startswith("test_") and name in names_in(path)}
    assert len(files) > 1
    assert files <= files_to_add("a sampling parameter")


def test_the_row_state_declares_no_parameter_again() -> None:
    assert not set(RowParameters.__annotations__) & set(RowState.__annotations__)


def declarations() -> list[tuple[str, str]]:
    """Fields that are declared with bounds or a description, each with its file."""
    return [
        (node.target.id, name_of(path))
        for path in sources(*PACKAGES)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in SETTINGS
        if any(isinstance(call, ast.Call) and ast.unparse(call.func) in DECLARES for call in ast.walk(node.annotation))
    ]


def test_each_setting_is_declared_once_in_a_file_of_the_document() -> None:
    assert sorted(name for name, _ in declarations()) == sorted(SETTINGS)
    assert {file for _, file in declarations()} <= files_to_add("a setting")


def test_no_setting_is_the_engine_s_and_the_front_end_s() -> None:
    assert not settings_of(EngineSettings).keys() & settings_of(FrontEndSettings).keys()


def test_every_setting_has_a_description_and_every_number_has_bounds() -> None:
    assert not [name for name, setting in SETTINGS.items() if not setting.description]
    numbers = {name: setting.meta for name, setting in SETTINGS.items() if setting.base in (int, float)}
    assert len(numbers) > 10
    assert not [name for name, meta in numbers.items() if meta.le is None or (meta.ge is None and meta.gt is None)]


# Words that mean nothing but the setting: neither a field of the contract nor of the engine's own parts.
@pytest.mark.parametrize(
    "name", ["load_format", "jitter_seed", "insecure", "shutdown_grace_s", "log_level", "log_format", "served_name"]
)
def test_a_setting_stands_where_it_is_declared_and_where_the_document_says_that_it_takes_effect(name: str) -> None:
    files = {name_of(path) for path in sources(*PACKAGES) if name in names_in(path)}
    # Of `load_format`: who loads, and who needs no weights whatever it says. A library calls something `log_level` too.
    others = {"runtime/models/load.py", "service/commands/engine_commands.py", "runtime/grammar/matcher.py"}
    assert files <= files_to_add("a setting") | others


@pytest.mark.parametrize("name", ["run_ahead_tokens", "prefill_chunk", "max_prefill_tokens", "log_interval", "threads"])
def test_the_front_end_hands_a_setting_of_the_engine_on_without_its_name(name: str) -> None:
    assert not [name_of(path) for path in sources("service") if name in names_in(path)]


# Words that mean nothing but the figure.
@pytest.mark.parametrize(
    "name",
    [
        "generated_tokens",
        "void_rows",
        "held_rows",
        "recomputed_tokens",
        "prefill_chunks",
        "front_ends_lost",
        "held_back",
    ],
)
def test_a_counter_stands_where_the_document_says_and_not_in_the_front_end(name: str) -> None:
    files = {name_of(path) for path in sources(*PACKAGES) if name in names_in(path)}
    assert {"runtime/wire/figures.py", "runtime/engine/engine_stats.py"} <= files
    files -= {"service/stats/metrics.py"}  # which says it to others once more
    assert files <= files_to_add("a counter") | {"runtime/engine/loop.py"}, "which counts what waits, and logs totals"
    assert not [file for file in files if file.startswith("service/")]


def counters_named(*folders: str, counted: bool) -> set[str]:
    """Names in `counters["..."]`, where they are counted up or where they are read."""
    return {
        node.slice.value
        for path in sources(*folders)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "counters"
        if isinstance(node.ctx, ast.Store) is counted
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    }


def test_every_counter_that_is_served_is_counted_and_none_is_counted_for_nobody() -> None:
    """A name that nobody counts would be 0 for ever, and nothing would say so."""
    served = {*COUNTED, "front_ends_lost", "aborted_preparing"}  # the last two are asked for with `get`
    assert served >= counters_named("runtime/engine", counted=False)
    assert served == counters_named("runtime", counted=True)
