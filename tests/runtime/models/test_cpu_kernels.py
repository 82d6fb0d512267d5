"""At every start of the CPU device its kernels are tried: where one way fails the other is taken, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runahead.runtime import models
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.reference.linear import (
    OneDnnProducts,
    Products,
    choose_products,
    product_ways,
    rows_keep_their_bits,
)
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.cpu_check import cpu_kernels
from runahead.runtime.models.cpu_check.cpu_kernels import NoKernelsError, choose_kernels, tried_kernels
from runahead.runtime.models.cpu_check.self_test import SelfTestReport
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process import cpu
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.main import EXIT_CANNOT_START
from runahead.runtime.wire.engine_config import EngineConfig
from tests.gpu import gpu_chain
from tests.runtime.kernels.broken_products import AddedTogether, NotBuilt, RowsTogether, ThreadsTogether, TooLarge
from tests.runtime.models.checkpoints import CASES, save

BUNDLED = Path(models.__path__[0]) / "bundled"
CONFIG = gpu_chain.small_config()


def nothing(done: int, total: int) -> None:
    pass


def test_the_kernels_that_are_taken_here_were_tried_on_the_models_own_shapes() -> None:
    kernels, trial = choose_kernels(load_config(open_checkpoint(BUNDLED)))
    names = [type(products).__name__ for products in product_ways()]
    assert trial.products == names[len(trial.failed)], "the first that does not fail"
    assert list(trial.failed) == names[: len(trial.failed)]
    assert trial.products == type(choose_products()).__name__
    assert trial.tokens > 200
    assert trial.forwards > 20
    assert trial.widest_forward > 48
    assert trial.threads == torch.get_num_threads()
    weight = torch.randn(8, 4)
    assert kernels.linear(torch.eye(4), kernels.pack_weight(weight)).allclose(weight.t())


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (RowsTogether(), "how many rows"),
        (AddedTogether(), "have other logits among"),
        (NotBuilt(), "no such product"),
    ],
    ids=["products", "whole decoder", "not built"],
)
def test_where_one_way_fails_the_other_is_taken(first: Products, sentence: str) -> None:
    _, trial = choose_kernels(CONFIG, (first, OneDnnProducts()))
    assert trial.products == "OneDnnProducts"
    assert list(trial.failed) == [type(first).__name__]
    assert sentence in trial.failed[type(first).__name__]


class DeepRowsTogether(OneDnnProducts):
    """Sums over so many numbers depend on how many rows there are: none of CONFIG's, and those of a head for it."""

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().cut(x + len(x) * 1e-3 if x.shape[1] == 3 * CONFIG.hidden_size else x)


def test_a_way_that_fails_for_the_shapes_of_a_draft_head_is_not_taken() -> None:
    """Else what is guessed of a row, and how many drafts are counted, would depend on the rows beside it."""
    depth = 3 * CONFIG.hidden_size
    assert depth not in [shape[0] for shape in cpu_kernels._shapes(CONFIG)]
    _, without = choose_kernels(CONFIG, (DeepRowsTogether(), OneDnnProducts()))
    _, trial = choose_kernels(CONFIG, (DeepRowsTogether(), OneDnnProducts()), more=[(depth, CONFIG.hidden_size)])
    assert (without.products, trial.products) == ("DeepRowsTogether", "OneDnnProducts")
    assert "how many rows" in trial.failed["DeepRowsTogether"]


def test_a_way_that_only_the_whole_decoder_shows_to_fail_passes_the_products_alone() -> None:
    assert rows_keep_their_bits(AddedTogether())


def test_where_no_way_holds_the_start_is_refused_and_each_is_named() -> None:
    with pytest.raises(NoKernelsError) as refused:
        choose_kernels(CONFIG, (AddedTogether(), RowsTogether()))
    sentence = str(refused.value)
    assert sentence.startswith("device cpu can't be served on this machine: ")
    assert "AddedTogether: positions " in sentence
    assert "RowsTogether: a row of a product depends on how many rows there are" in sentence


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_as_before")
def test_where_many_threads_disturb_rows_fewer_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "product_ways", lambda: (ThreadsTogether(),))
    _, trial = tried_kernels(CONFIG, 13, fixed=False)
    assert list(trial.failed) == ["13 threads", "6 threads"], "half as many each time"
    assert trial.threads == torch.get_num_threads() == 3
    assert all("how many rows there are" in sentence for sentence in trial.failed.values())


@pytest.mark.usefixtures("threads_as_before")
def test_where_not_even_one_thread_holds_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "product_ways", lambda: (RowsTogether(),))
    with pytest.raises(NoKernelsError, match="RowsTogether: a row of a product depends on how many rows there are"):
        tried_kernels(CONFIG, 2, fixed=False)
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("threads_as_before")
def test_threads_that_somebody_asked_for_are_taken_as_they_are_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CASES[0], tmp_path)
    monkeypatch.setattr(cpu_kernels, "product_ways", lambda: (ThreadsTogether(),))
    with pytest.raises(NoKernelsError):
        assemble(EngineConfig(model=str(tmp_path), max_rows=4, num_blocks=40, device="cpu", threads=4), nothing)
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    assemble(EngineConfig(model=str(tmp_path), max_rows=4, num_blocks=40), nothing).device.close()
    assert torch.get_num_threads() == 2, "8, 4, 2"


def test_memory_that_is_not_enough_is_no_word_on_the_products() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        choose_kernels(CONFIG, (TooLarge(), OneDnnProducts()))
    assert type(raised.value) is RuntimeError


def test_where_torch_has_no_way_at_all_the_sentence_says_that_and_nothing_of_rows() -> None:
    with pytest.raises(NoKernelsError) as refused:
        choose_kernels(CONFIG, (NotBuilt(),))
    assert str(refused.value) == (
        "device cpu can't be served on this machine: this build of torch has none of the products that it computes "
        "with. Tried NotBuilt: this build has no such product"
    )


def test_every_kind_of_window_is_tried_and_the_trial_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(decoder: Decoder, *arguments: object) -> SelfTestReport:
        seen.append(decoder.config)
        return SelfTestReport(1, 1, 1, 1)

    monkeypatch.setattr(cpu_kernels, "self_test", watched)
    windows = (0, 32, 0, 32, 0, 32)
    wide = gpu_chain.small_config(num_layers=6, windows=windows, vocab_size=100_000, architecture="Qwen3ForCausalLM")
    choose_kernels(wide)
    (config,) = seen
    assert isinstance(config, DenseConfig)
    assert config.num_layers == len(config.windows) == 2
    assert 0 in config.windows and 0 < max(config.windows) < 48, "some sequences outgrow it"
    assert config.vocab_size <= 4096
    assert (config.hidden_size, config.intermediate_size) == (CONFIG.hidden_size, CONFIG.intermediate_size)
    assert config.architecture == "Qwen3ForCausalLM"


def test_an_engine_is_served_by_the_way_that_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(CASES[0], tmp_path)
    monkeypatch.setattr(cpu_kernels, "product_ways", lambda: (RowsTogether(), OneDnnProducts()))
    parts = assemble(EngineConfig(model=str(tmp_path), max_rows=4, num_blocks=40, device="cpu", threads=1), nothing)
    served = parts.device._program._model.kernels  # type: ignore[attr-defined]
    parts.device.close()
    assert type(served._products) is OneDnnProducts


def test_a_start_is_refused_before_any_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(CASES[0], tmp_path)
    monkeypatch.setattr(cpu, "load_model", lambda *parts: pytest.fail("the weights were read"))
    monkeypatch.setattr(cpu_kernels, "product_ways", lambda: (RowsTogether(),))
    with pytest.raises(NoKernelsError):
        assemble(EngineConfig(model=str(tmp_path), max_rows=4, num_blocks=40, device="cpu", threads=1), nothing)


def started(tmp_path: Path, before: str) -> subprocess.CompletedProcess[str]:
    """The engine's process over the bundled model, after `before`; its input ends at once, and so does it."""
    program = f"import sys\nfrom runahead.runtime.process.main import main\n{before}\nsys.exit(main())"
    config = {"model": str(BUNDLED), "device": "cpu", "num_blocks": 130, "threads": 1}
    orders = json.dumps({"socket": str(tmp_path / "engine"), "parent": os.getpid(), "config": config}) + "\n"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, input=orders, capture_output=True, text=True, timeout=120, check=False)


def test_what_was_found_is_logged_at_the_start(tmp_path: Path) -> None:
    process = started(tmp_path, "")
    assert process.stdout == "ready cpu\n"
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    events = [line["event"] for line in lines]
    first = [events.index(event) for event in ("trying_kernels", "kernels_tried", "loading", "chain")]
    assert first == sorted(first), "what takes long is announced, and what was found is told before weights are read"
    (found,) = [line for line in lines if line["event"] == "kernels_tried"]
    ways = [type(products).__name__ for products in product_ways()]
    assert found["threads"] == 1
    assert found["tokens"] > 200
    assert [*found["failed"]] == ways[: ways.index(found["products"])], "the first way that holds is served"


def test_a_process_on_a_machine_where_nothing_holds_says_so_and_ends(tmp_path: Path) -> None:
    process = started(
        tmp_path,
        "from runahead.runtime.models.cpu_check import cpu_kernels\n"
        "from tests.runtime.kernels import broken_products as broken\n"
        "cpu_kernels.product_ways = lambda: (broken.RowsTogether(), broken.AddedTogether())",
    )
    assert process.returncode == EXIT_CANNOT_START
    assert process.stdout == ""
    *announced, sentence = process.stderr.splitlines()
    assert [json.loads(line)["event"] for line in announced] == ["sizes", "trying_kernels"]
    assert sentence.startswith("device cpu can't be served on this machine: ")
