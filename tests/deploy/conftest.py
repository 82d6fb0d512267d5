"""The manifests, rendered once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tests.deploy.rendering import COMPOSITIONS, Manifests, render


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The YAML of each composition."""
    return {name: render(each, tmp_path_factory.mktemp(name)) for name, each in COMPOSITIONS.items()}


@pytest.fixture
def manifests(texts: Mapping[str, str]) -> Callable[[str], Manifests]:
    """Those of a composition, to be changed at will."""
    return lambda name: Manifests(texts[name])
