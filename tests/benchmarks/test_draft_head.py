"""How the bundled model's draft head is trained: what it is taught is what is served, and a seed decides the rest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmarks.bundled_model.head_network import HeadNetwork
from benchmarks.bundled_model.head_text import batches, bundled_network, completions, frequent, with_hidden
from benchmarks.bundled_model.network import Network, Shape
from benchmarks.bundled_model.train_head import train
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from tests.runtime.models.eagle_heads import HeadByDefinition

HEADS = ['def read(path):\n    """Read it."""\n', "def close(self):\n", "def size_of(items):\n", "def main():\n"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def network() -> Network:
    return bundled_network(BUNDLED_FOLDER, torch.device("cpu"))


@pytest.fixture(scope="module")
def written(network: Network) -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(BUNDLED_FOLDER / "tokenizer.json"))
    return completions(network, tokenizer, HEADS, count=4, length=48, batch=4, seed=3)


def test_what_is_unrolled_is_what_the_definition_proposes() -> None:
    torch.manual_seed(1)
    shape = Shape(vocabulary=60, ffn=96)
    head = HeadNetwork(shape)
    tensors = {name: 6 * value if value.dim() == 2 else value for name, value in head.state_dict().items()}
    head.load_state_dict(tensors)
    embedding, hidden = torch.randn(60, shape.hidden), torch.randn(12, shape.hidden)
    by_definition = HeadByDefinition(tensors, embedding, embedding)
    prompt = np.random.default_rng(0).integers(0, 60, 9).tolist()
    proposed = by_definition.proposes(prompt, [hidden.double().numpy()], 4)
    ids = torch.tensor([prompt + proposed[:-1]])
    with torch.no_grad():
        expected = head.unrolled(embedding[ids], hidden[None], 4)
    guessed = [int((embedding @ states[0, len(prompt) - 2 + place]).argmax()) for place, states in enumerate(expected)]
    assert guessed == proposed
    assert len(set(proposed)) > 1


def test_heads_are_completed_greedily_in_every_second_row(network: Network, written: torch.Tensor) -> None:
    assert written.shape == (4, 48) and int(written.min()) >= 0
    rows = with_hidden(network, written, 4)
    likeliest = F.linear(rows.hidden.float(), network.model.embed_tokens.weight).argmax(-1)
    agrees = (likeliest[:, 24:-1] == written[:, 25:]).float().mean(1)
    assert agrees[::2].min() > 0.9, "the arithmetic is bfloat16: near ties may differ"
    assert agrees[1::2].max() < 0.9


def test_a_seed_decides_the_head(network: Network, written: torch.Tensor, tmp_path: Path) -> None:
    rows = with_hidden(network, written, 4)
    files: list[bytes] = []
    for seed in (7, 7, 8):
        out = tmp_path / str(len(files))
        given = argparse.Namespace(
            seed=seed,
            rate=3e-3,
            decay=0.1,
            tokens=96,
            steps=2,
            unroll=3,
            compared=0.5,
            hidden_weight=1.0,
            out=out,
            guessed=200,
        )
        shares = train(network, [rows], rows, given, Shape(ffn=64))
        assert len(shares) == 8 and 1 <= shares[-1] <= 8
        files.append((out / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_the_most_frequent_tokens_are_guessed(network: Network, written: torch.Tensor) -> None:
    rows = with_hidden(network, written, 4)
    counts = torch.bincount(written.flatten(), minlength=4096)
    found = frequent([rows], 4096, 5)
    assert found.tolist() == sorted(found.tolist())
    assert sorted(counts[found].tolist()) == counts.sort().values[-5:].tolist()


def test_batches_go_through_every_row_of_a_pool(network: Network, written: torch.Tensor) -> None:
    rows = with_hidden(network, written, 4)
    stream = batches([rows], tokens=96, seed=0)
    seen = torch.cat([next(stream).ids for _ in range(2)])
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, written.tolist()))
