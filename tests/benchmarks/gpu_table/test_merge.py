"""Results in files: whole, of one format, and merged only where they belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu_table import results
from benchmarks.gpu_table.errors import ResultError
from benchmarks.gpu_table.merge import MERGED, Merged, merge, merge_folder
from benchmarks.gpu_table.results import FORMAT
from tests.benchmarks.gpu_table.sample_results import H200, VERSIONS, cell, result

PUBLISHED = sorted((results.ROOT / "benchmarks/results/gpu").glob("*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_what_is_published_can_be_read(path: Path) -> None:
    result = results.read(path)
    assert path == results.path_of(result.part, path.parent) and not result.failure


def test_parts_of_one_commit_and_one_kind_of_gpu_become_one_file(tmp_path: Path) -> None:
    other_host = msgspec.structs.replace(H200, cpu="EPYC", driver="580.2")
    parts = [
        result("lengths-8B", cell("8B", 1, "engine", 4.6), machine=other_host),
        result("engine-8B", cell("8B", 1, "graph", 4.5)),
    ]
    for part in parts:
        results.write(part, tmp_path)
    merged = merge_folder(tmp_path)
    assert [part.part for part in merged.parts] == ["engine-8B", "lengths-8B"]
    assert msgspec.json.decode((tmp_path / MERGED).read_bytes(), type=Merged) == merged
    assert merge_folder(tmp_path) == merged, "the merged file is not taken for a part"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"commit": "ffffffffffff"}, "their commit differs: 0123456789ab: engine-8B; ffffffffffff: lengths-8B"),
        ({"commit": "0123456789ab.dirty"}, "their commit differs"),
        (
            {"machine": msgspec.structs.replace(H200, gpu="NVIDIA H100")},
            "their GPU differs: NVIDIA H200: engine-8B; NVIDIA H100",
        ),
        ({"versions": msgspec.structs.replace(VERSIONS, torch="2.12.0")}, "their torch differs"),
        ({"versions": msgspec.structs.replace(VERSIONS, triton="3.7.0")}, "their triton differs"),
        ({"settings": {"repeats": 1}}, "their repeats differs"),
        ({"settings": {"repeats": 3, "asked": "a=1"}}, "their --set differs: none: engine-8B; a=1: lengths-8B"),
    ],
)
def test_a_mixture_is_refused_by_its_name(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ResultError, match=sentence):
        merge([result("engine-8B"), result("lengths-8B", **changes)])


def test_a_part_that_comes_twice_is_refused() -> None:
    with pytest.raises(ResultError, match="more than once: engine-8B"):
        merge([result("engine-8B"), result("engine-8B", date="2026-11-22T07:00:00Z")])


def test_nothing_can_not_be_merged(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no result"):
        merge_folder(tmp_path)


def test_a_file_under_the_name_of_another_part_is_refused(tmp_path: Path) -> None:
    results.write(result("engine-8B"), tmp_path).rename(tmp_path / "part-lengths-8B.json")
    with pytest.raises(ResultError, match=r"part-lengths-8B\.json holds the part engine-8B"):
        merge_folder(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"seconds"', '"minutes"'),
        lambda text: text.replace('"way": "engine"', '"way": "telepathy"'),
        lambda text: text.replace('"rows": 1', '"rows": "one"'),
        lambda text: text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'),
    ],
    ids=["cut off", "unknown field", "unknown way", "wrong type", "another format"],
)
def test_a_file_that_is_no_result_is_refused_by_its_name(damage: Any, tmp_path: Path) -> None:
    path = results.write(result("engine-8B", cell("8B", 1, "engine", 4.5)), tmp_path)
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    with pytest.raises(ResultError, match=r"part-engine-8B\.json"):
        results.read(path)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    whole = result("engine-8B", cell("8B", 1, "engine", 4.5, runs=((0.2, 1.3),)), cell("8B", 8, "engine", None))
    assert results.read(results.write(whole, tmp_path)) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["part-engine-8B.json"]


def test_a_commit_that_git_contradicts_or_nobody_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "commit_of", lambda checkout: "0123456789ab.dirty")
    assert results.commit(None) == results.commit("0123456789abcdef") == "0123456789ab.dirty"
    with pytest.raises(ResultError, match=r"--commit says ffff, and this checkout is of 0123456789ab\.dirty"):
        results.commit("ffff")
    monkeypatch.setattr(results, "commit_of", lambda checkout: None)
    assert results.commit("0123456789abcdef") == "0123456789ab"
    with pytest.raises(ResultError, match="name the commit that is measured with --commit"):
        results.commit(None)
