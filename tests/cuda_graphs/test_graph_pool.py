"""A capture, over a CUDA that is made of words: nothing that the driver refuses meanwhile is asked of it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runahead.cuda_graphs import graph_pool
from runahead.cuda_graphs.buckets import GraphKey, Piece
from runahead.cuda_graphs.device import Form
from runahead.cuda_graphs.graph_pool import GraphPool

KEY = GraphKey(Piece.SAMPLE, 1, Form.PLAIN)


class Mapped:
    """Memory that was mapped, and is unmapped when nobody holds it; it holds itself, so that a collection finds it."""

    def __init__(self, unmapped: list[str], cuda: SimpleNamespace) -> None:
        self.itself = self
        weakref.finalize(self, lambda: unmapped.append("within a capture" if cuda.is_capturing else "outside"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    said = SimpleNamespace(is_capturing=False)

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        said.is_capturing = True
        try:
            yield
        finally:
            said.is_capturing = False

    monkeypatch.setattr(graph_pool, "_graph_of_random_state", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **_: SimpleNamespace(instantiate=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return said


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """A collection after each few new objects."""
    before = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collector")
def test_what_was_mapped_is_not_unmapped_within_a_capture(cuda: SimpleNamespace) -> None:
    unmapped: list[str] = []
    stream: Any = None
    pool = GraphPool(stream)

    def work() -> None:
        Mapped(unmapped, cuda)
        assert len([[] for _ in range(1000)]) == 1000, "as many new objects as a collection waits for"

    pool.capture(KEY, work)
    gc.collect()
    assert unmapped == ["outside"] and len(pool) == 1


def test_garbage_is_collected_again_after_a_capture_even_one_that_failed(cuda: SimpleNamespace) -> None:
    stream: Any = None

    def fails() -> None:
        assert cuda.is_capturing and not gc.isenabled()
        raise RuntimeError("the launch failed")

    with pytest.raises(RuntimeError, match="the launch failed"):
        GraphPool(stream).capture(KEY, fails)
    assert gc.isenabled()
