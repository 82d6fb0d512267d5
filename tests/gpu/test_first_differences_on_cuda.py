"""In bfloat16 on a GPU, where a request's tokens first differ from what they were is a near tie: among neighbours by
the fastest kernels; by the exact ones behind a prefix found, in other chunks and after an eviction.

What is near, and how many may differ, is in `first_differences.py`; each test prints what was measured (`pytest -s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.gpu.first_differences import among_neighbours, check, computed_otherwise, requests
from tests.parity.upcycled import BUNDLED, upcycled

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

COUNT: Final = 32
PROMPT: Final = (3, 250)
TOKENS: Final = (30, 90)
NAMES: Final = ("dense", "hybrid", "mixtral")
DEPTHS: Final[Mapping[str, tuple[int, ...]]] = {"dense": (2, 0, 4), "hybrid": (2, 0), "mixtral": (4,)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that were trained, so that their logits are as far apart as anybody's; the experts are the dense one's."""
    mixtral = upcycled(tmp_path_factory.mktemp("mixtral"))
    return {"dense": BUNDLED, "hybrid": BUNDLED / "hybrid", "mixtral": mixtral}


@pytest.mark.parametrize("name", NAMES)
def test_by_the_fastest_kernels_neighbours_change_near_ties_alone(folders: dict[str, Path], name: str) -> None:
    asked = requests(folders[name], COUNT, PROMPT, TOKENS)
    found = check(among_neighbours(folders[name], "cuda", asked, DEPTHS[name]), folders[name])
    assert len(found) == len(DEPTHS[name])


@pytest.mark.parametrize("name", NAMES)
def test_by_the_exact_kernels_what_is_computed_otherwise_changes_near_ties_alone(
    folders: dict[str, Path], name: str
) -> None:
    asked = requests(folders[name], COUNT, PROMPT, TOKENS)
    found = check(computed_otherwise(folders[name], "cuda", asked, has_states=name == "hybrid"), folders[name])
    assert len(found) == 5
