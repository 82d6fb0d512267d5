"""The file of tilings that `runahead tune` writes: what a start takes from it, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

import triton  # noqa: E402

from benchmarks.gpu_table.shapes import SHAPES  # noqa: E402
from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint  # noqa: E402
from runahead.runtime.kernels.triton.forward import tuned_tilings  # noqa: E402
from runahead.runtime.kernels.triton.forward.tuned_tilings import (  # noqa: E402
    TunedTilingsError,
    checked,
    neighbors,
    save_tuned_tilings,
    use_tuned_tilings,
)
from runahead.runtime.kernels.triton.gemm.tuning import Tiling, rows_tiling, tiling_key, tuned  # noqa: E402
from runahead.runtime.kernels.triton.gpu.capability import Gpu  # noqa: E402
from runahead.runtime.kernels.triton.moe.tuning import ExpertTiling  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.models.read_config import load_config  # noqa: E402
from runahead.runtime.programs.cuda import tuner  # noqa: E402

SMALL, LARGE = (1024, 2048, "add"), (4096, 4096, "add")  # of fewer weights than one sum takes, and of more
OTHER_GPU = Gpu("Another GPU", (8, 0), 99 << 10, 108)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of kernels of a GPU that the package knows nothing of."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(tuned_tilings, "current_gpu", lambda: OTHER_GPU)
    yield tmp_path
    tuned().clear()


def key_of(product: tuple[int, int, str], columns: int = 8) -> str:
    outputs, depth, epilogue = product
    return tiling_key(outputs, depth, columns, epilogue)


def tiling_of(product: tuple[int, int, str], columns: int = 8) -> Tiling:
    outputs, depth, epilogue = product
    return rows_tiling(outputs, depth, columns, epilogue)


def test_a_start_takes_the_tilings_that_were_found_for_its_gpu() -> None:
    found = {key_of(LARGE): replace(tiling_of(LARGE), rows=128), key_of(SMALL): replace(tiling_of(SMALL), block=128)}
    path = save_tuned_tilings(found)
    use_tuned_tilings()
    assert tiling_of(LARGE).rows == 128 and tiling_of(SMALL).block == 128
    path.write_text(json.dumps({"A third GPU": json.loads(path.read_text())[OTHER_GPU.name]}))
    use_tuned_tilings()
    assert not tuned() and tiling_of(LARGE).rows != 128, "another GPU's are not taken"


def test_what_is_found_later_joins_what_was_found_before() -> None:
    save_tuned_tilings({key_of(LARGE): replace(tiling_of(LARGE), rows=128)})
    path = save_tuned_tilings({key_of(SMALL): replace(tiling_of(SMALL), block=128)})
    assert json.loads(path.read_text())[OTHER_GPU.name].keys() == {key_of(LARGE), key_of(SMALL)}


def test_a_gpu_that_stands_for_an_older_one_and_a_start_without_the_file_take_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_tuned_tilings()
    assert not tuned()
    save_tuned_tilings({key_of(LARGE): replace(tiling_of(LARGE), rows=128)})
    monkeypatch.setattr(tuned_tilings, "current_gpu", lambda: replace(OTHER_GPU, stands_for_older=True))
    use_tuned_tilings()
    assert not tuned()


@pytest.mark.parametrize(("product", "splits"), [(SMALL, 2), (SMALL, 16), (LARGE, 2)])
def test_another_number_of_segments_is_refused(product: tuple[int, int, str], splits: int) -> None:
    right = tiling_of(product)
    assert right.splits != splits
    with pytest.raises(TunedTilingsError, match=rf"table: the entry .* cuts the product into {splits} segments"):
        checked({key_of(product): asdict(replace(right, splits=splits))}, "table")


@pytest.mark.parametrize(
    ("key", "entry", "sentence"),
    [
        ("attention 32/8 heads of 128, 8 x 1", {}, "names no product whose tiling can be changed"),
        ("4096x4096 add 1", asdict(Tiling(64, 64, 1, 2, 4)), "names no product whose tiling can be changed"),
        ("2/8 experts of 64x64 last 1", asdict(ExpertTiling(16, 16, 2, 4)), "is of a lone row"),
        ("2/8 experts of 64x64 last 4", asdict(Tiling(64, 64, 1, 2, 4)), "is no tiling of experts"),
        ("2/8 experts of 64x64 last 4", asdict(ExpertTiling(48, 16, 2, 4)), "has sizes that do not fit"),
        (key_of(LARGE), {}, "is no tiling of a product"),
        (key_of(LARGE), asdict(replace(tiling_of(LARGE), rows=2.0)), "is no tiling of a product"),  # type: ignore[arg-type]
        (key_of(LARGE), asdict(replace(tiling_of(LARGE), block=96)), "has sizes that do not fit"),
        (key_of(LARGE), asdict(replace(tiling_of(LARGE), direct=True, warps=3)), "has sizes that do not fit"),
    ],
)
def test_an_entry_that_is_no_tiling_or_would_change_bits_is_refused(
    key: str, entry: dict[str, object], sentence: str
) -> None:
    with pytest.raises(TunedTilingsError, match=sentence):
        checked({key: entry}, "table")


@pytest.mark.parametrize("text", ["{", "[]", '{"Another GPU": 1}'])
def test_a_file_that_is_no_table_is_refused_by_its_name(folder: Path, text: str) -> None:
    (folder / tuned_tilings.FILE).write_text(text)
    with pytest.raises(TunedTilingsError, match=r"runahead-tilings\.json .*remove it, or write it anew"):
        use_tuned_tilings()


@pytest.mark.parametrize("product", [SMALL, LARGE])
def test_tilings_that_are_tried_have_the_bits_of_the_one_in_use(product: tuple[int, int, str]) -> None:
    tiling = tiling_of(product)
    found = list(neighbors(key_of(product), tiling))
    assert len(found) >= 2 and tiling not in found and {asdict(one)["splits"] for one in found} == {tiling.splits}
    checked({key_of(product): asdict(found[0])}, "table")


@pytest.mark.parametrize("name", ["1B", "8B", "7B-A1B"])
def test_a_model_is_shortened_layer_by_layer_and_nothing_else_of_it(name: str) -> None:
    """The name of 1B's architecture has as many letters as the model has layers."""
    config = SHAPES[name].described()
    few = tuner.few_layers(config)
    assert (few.architecture, few.eos_token_ids) == (config.architecture, config.eos_token_ids)
    assert few.num_layers < config.num_layers


def small_step(name: str, rows: int) -> tuple[Decoder, tuner.DecodeStep]:
    model = tuner.tuned_model(tuner.few_layers(SHAPES[name].described()), torch.bfloat16, DEVICE, 64, 1)
    return model, tuner.DecodeStep(model, rows, tokens=20)


def test_a_rank_s_products_are_those_of_its_part() -> None:
    """The key of a product begins with its outputs and its depth. A rank stores what the whole model adds."""
    config = tuner.few_layers(load_config(open_checkpoint(BUNDLED_FOLDER)))
    whole, part = (tuner.tuned_model(config, torch.bfloat16, DEVICE, 64, ranks) for ranks in (1, 2))
    of_whole, of_part = (
        {tuple(map(int, key.split()[0].split("x"))) for key, _ in tuner.tilings_in_use(model, 2)}
        for model in (whole, part)
    )
    assert len(of_part) == len(of_whole) > 2
    halves = {(outputs // 2, depth) for outputs, depth in of_whole} | {
        (outputs, depth // 2) for outputs, depth in of_whole
    }
    assert of_part <= halves
    assert any(" add " in key for key, _ in tuner.tilings_in_use(whole, 2))
    assert not any(" add " in key for key, _ in tuner.tilings_in_use(part, 2))
    bits = tuner.DecodeStep(part, 2, tokens=20).bits()
    assert bits.shape[1] == part.weights.lm_head.shape[0] == part.config.vocab_size // 2
    assert torch.isfinite(bits).all() and bits.any()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the times themselves say what is faster")
def test_the_fastest_tiling_with_the_same_bits_is_found() -> None:
    model, step = small_step("tiny-hybrid", 2)
    in_use = list(tuner.tilings_in_use(model, 2))
    assert {type(one) for _, one in in_use} == {Tiling, ExpertTiling}
    key, tiling = in_use[-1]
    fast = next(iter(neighbors(key, tiling)))
    others: list[int] = []

    def time_us(work: object) -> float:
        others.append(len(tuned()))
        return 50.0 if tuned().get(key) == asdict(fast) else 100.0

    found = tuner.tune_step(step, in_use[-1:], time.monotonic() + 60, time_us)
    assert found == {key: fast} and tuned()[key] == asdict(fast)
    assert max(others) == 1, "one product at a time"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the times themselves say what is faster")
def test_a_tiling_that_changes_a_bit_and_one_that_can_not_run_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = small_step("tiny-hybrid", 2)
    in_use = list(tuner.tilings_in_use(model, 2))[:1]
    (key, _), bits, calls = in_use[0], step.bits, list[int]()
    monkeypatch.setattr(step, "bits", lambda: bits() + (1 if key in tuned() else 0))

    def time_us(work: object) -> float:
        if key not in tuned():
            return 100.0
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of resource: shared memory")
        return 50.0

    assert tuner.tune_step(step, in_use, time.monotonic() + 60, time_us) == {} and key not in tuned()
    assert len(calls) > 1
