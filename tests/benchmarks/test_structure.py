"""What the benchmark of structures says of a batch's pace, and the checkpoint that it makes of a shape."""

from __future__ import annotations

from benchmarks.broken_structures import Canary, quantile
from benchmarks.chain_figures import ChainFigures
from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.structure import Batch, Cell, random_weights
from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.models.read_config import load_config


def batch(pace: float) -> Batch:
    return Batch((0.1,), pace, ChainFigures(), {})


def test_the_pace_is_the_median_of_rounds_and_stands_beside_what_was_published_of_one_row() -> None:
    rounds = ((batch(100.0), batch(98.0)), (batch(50.0), batch(25.0)), (batch(200.0), batch(198.0)))
    assert Cell(1, rounds).pace_line.split("batch: ")[1] == (
        "none 100, beside 98, 0.98 (published of vLLM: 132.7 and 106.1, 0.80)"
    )
    assert Cell(32, rounds).pace_line.endswith("none 100, beside 98, 0.98")


def test_a_shape_has_the_bundled_tokenizer_and_a_vocabulary_of_its_own() -> None:
    with random_weights("8B") as folder:
        checkpoint = open_checkpoint(folder)
        assert checkpoint.has_tokenizer
        assert load_config(checkpoint) == SHAPES["8B"].described()
        assert (folder / "tokenizer.json").read_bytes() == (BUNDLED_FOLDER / "tokenizer.json").read_bytes()


def test_a_canarys_figures_are_quantiles_of_its_gaps() -> None:
    gaps = [n / 1000 for n in range(100, -1, -1)]
    assert (quantile(gaps, 0.5), quantile(gaps, 0.99), quantile([7.0], 0.99)) == (0.05, 0.099, 7.0)
    assert Canary(gaps).figures == "p50 50.0 ms, p99 99.0 ms, 20 tokens/s"
