"""In bfloat16 on a GPU neighbours change no token of a request, at any depth. Where it is computed otherwise, behind a
prefix found, in other chunks and after an eviction, the first token that differs is a near tie.

What is near, and how many may differ, is in `first_differences.py`; each test prints what was measured (`pytest -s`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.gpu.first_differences import among_neighbours, check, computed_otherwise, requests
from tests.parity.upcycled import BUNDLED, upcycled

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

COUNT: Final = 48
PROMPT: Final = (3, 250)
TOKENS: Final = (30, 90)
NAMES: Final = ("dense", "hybrid", "mixtral")
DEPTHS: Final = (0, 1, 2, 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that were trained, so that their logits are as far apart as anybody's; the experts are the dense one's."""
    mixtral = upcycled(tmp_path_factory.mktemp("mixtral"))
    return {"dense": BUNDLED, "hybrid": BUNDLED / "hybrid", "mixtral": mixtral}


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_change_no_token_at_any_depth(folders: dict[str, Path], name: str) -> None:
    asked = requests(folders[name], COUNT, PROMPT, TOKENS)
    pairs = list(among_neighbours(folders[name], "cuda", asked, DEPTHS))
    assert len(pairs) == len(DEPTHS)
    for pair in pairs:
        both = zip(pair.one, pair.other, strict=True)
        assert [number for number, (one, other) in enumerate(both) if one != other] == [], pair.what


@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_otherwise_changes_near_ties_alone(folders: dict[str, Path], name: str) -> None:
    asked = requests(folders[name], COUNT, PROMPT, TOKENS)
    found = check(computed_otherwise(folders[name], "cuda", asked, has_states=name == "hybrid"), folders[name])
    assert len(found) == 5
