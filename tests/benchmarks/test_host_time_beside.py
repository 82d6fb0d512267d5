"""Two checkouts are compared only if each process has measured the code of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import host_time_beside


def checkout(folder: Path, host_time: str) -> Path:
    """A folder whose `benchmarks.host_time` has this text."""
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks/host_time.py").write_text(host_time)
    return folder


ELSEWHERE = "from runahead.runtime.engine.loop import Engine\n"


@pytest.mark.parametrize(
    ("host_time", "sentence"),
    [
        ("", "imports no Engine"),
        ("import runahead.that_is_not_there\n", "is made by `make setup`"),
        (ELSEWHERE, "the engine is from "),
    ],
    ids=["another layout", "modules that are not found", "another checkout's engine"],
)
def test_a_checkout_that_would_not_be_measured_itself_is_refused(
    host_time: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = checkout(tmp_path, host_time)
    with pytest.raises(SystemExit, match=f"{tmp_path} could not be measured; what its process said is above"):
        host_time_beside.main(other, (1,))
    assert sentence in capfd.readouterr().err


def test_a_checkout_with_an_engine_of_its_own_is_measured(tmp_path: Path) -> None:
    other = checkout(
        tmp_path,
        "from dataclasses import dataclass\n\n@dataclass\nclass HostTime:\n    median_us: float\n\n"
        "class Engine: ...\n\ndef measure(rows, lifecycle):\n    return HostTime(7.0 * rows)\n",
    )
    assert host_time_beside._measured(other, 3, True) == {"median_us": 21.0}
