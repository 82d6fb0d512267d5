"""What quantization costs on real text: bits per byte of a held-out file, against the bundled model in 16 bits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks.bundled_model.compression import Scorer
from benchmarks.bundled_model.corpus import HELD_OUT, read_file, standard_library
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.runtime.checkpoint.quantize import quantize

FILE = "dbm/__init__.py"


@cache
def definitions() -> tuple[str, ...]:
    path = standard_library() / FILE
    if not path.is_file():
        pytest.skip(f"this Python's library has no {FILE}")
    assert FILE in json.loads(HELD_OUT.read_text())["files"]
    raw = path.read_bytes()
    found = read_file(FILE, raw.decode(), raw)
    assert found is not None
    return found.definitions


def test_fp8_keys_and_values_take_few_more_bits_of_a_held_out_file() -> None:
    bits = Scorer(BUNDLED_FOLDER, "fp8").bits(definitions())
    assert 0 < abs(bits / bits_of_the_model() - 1) <= 0.005


@cache
def bits_of_the_model() -> float:
    return Scorer(BUNDLED_FOLDER).bits(definitions())


@pytest.mark.parametrize(("name", "group", "most"), [("fp8-per-channel", 128, 0.005), ("int4-packed", 128, 0.04)])
def test_a_held_out_file_takes_few_more_bits(name: str, group: int, most: float, tmp_path: Path) -> None:
    quantize(BUNDLED_FOLDER, tmp_path, name, group)
    bits = Scorer(tmp_path).bits(definitions())
    assert 0 < abs(bits / bits_of_the_model() - 1) <= most
