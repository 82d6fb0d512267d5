"""The picture of the chain, drawn on the CPU: the code that a GPU runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import chain_picture


def test_one_engine_is_drawn_serial_and_ahead_beside_a_prompt_with_random_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[chain_picture.Recorder] = []
    begin = chain_picture.Recorder.__init__

    def counted(self: chain_picture.Recorder, *arguments: object) -> None:
        made.append(self)
        begin(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(chain_picture.Recorder, "__init__", counted)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "out.svg"), "--shape", "tiny", "--prompt", "600"])
    chain_picture.main()
    drawn = (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert "tiny (random weights), 8 rows beside a prompt of 600 tokens" in drawn
    assert drawn.index("serial") < drawn.index("run_ahead=2")
    printed = capsys.readouterr().out
    assert printed.count("plan  ") == 2, "figures of both"
    assert re.findall(r"(\d+) mixed", printed) == ["3", "3"], "the second prompt of 600 was not in the prefix cache"
    assert len(made) == 1
