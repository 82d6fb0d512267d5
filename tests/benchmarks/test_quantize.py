"""What quantization costs on real text: bits per byte of a held-out file, against the bundled model in 16 bits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.bundled_model.compression import Scorer
from benchmarks.bundled_model.corpus import HELD_OUT, read_file, standard_library
from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.runtime.kernels.layers import Experts, Linear
from runahead.runtime.kernels.reference import forward, mamba2
from runahead.runtime.kernels.reference.experts import BoundExperts
from runahead.runtime.kernels.reference.linear import Product, Products, bound_product
from tests.runtime.checkpoint.quantize import quantize
from tests.runtime.kernels.quantized_weights import rows_through_fp8

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
    assert 0 < abs(bits / bits_of(BUNDLED_FOLDER) - 1) <= 0.005


@cache
def bits_of(folder: Path) -> float:
    return Scorer(folder).bits(definitions())


@pytest.mark.parametrize(("name", "group", "most"), [("fp8-per-channel", 128, 0.005), ("int4-packed", 128, 0.04)])
def test_a_held_out_file_takes_few_more_bits(name: str, group: int, most: float, tmp_path: Path) -> None:
    quantize(BUNDLED_FOLDER, tmp_path, name, group)
    bits = Scorer(tmp_path).bits(definitions())
    assert 0 < abs(bits / bits_of(BUNDLED_FOLDER) - 1) <= most


@dataclass
class RowsThroughFp8:
    """A product of the CPU that reads rows as a GPU's does. read: depths of the products that were computed."""

    product: Product
    products: Products
    read: set[int]

    def write(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self.product.write(self._rows(x), out)

    def add(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self.product.add(self._rows(x), out)

    def _rows(self, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows = torch.cat(x, 1)
        self.read.add(rows.shape[1])
        return self.products.cut(rows_through_fp8(rows))


@pytest.mark.parametrize(
    ("folder", "name", "group", "depths"),
    [
        (BUNDLED_FOLDER, "fp8-per-channel", 128, {256, 640}),
        (BUNDLED_FOLDER / "hybrid", "fp8-blocks", 64, {64, 192}),
    ],
    ids=("dense", "experts"),
)
def test_rows_in_fp8_as_on_a_gpu_take_few_more_bits_too(
    folder: Path, name: str, group: int, depths: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_experts, read = BoundExperts.of, set[int]()

    def linear(products: Products, linear: Linear) -> Product:
        product = bound_product(products, linear)
        return product if linear.quantized is None else RowsThroughFp8(product, products, read)

    def experts(weights: Experts, products: Products) -> BoundExperts:
        made = bind_experts(weights, products)
        first = (replace(one, product=RowsThroughFp8(one.product, products, read)) for one in made.first)
        return replace(made, first=tuple(first), down=tuple(RowsThroughFp8(one, products, read) for one in made.down))

    monkeypatch.setattr(forward, "bound_product", linear)
    monkeypatch.setattr(mamba2, "bound_product", linear)
    monkeypatch.setattr(BoundExperts, "of", experts)
    quantize(folder, tmp_path, name, group)
    bits = Scorer(tmp_path).bits(definitions())
    assert read == depths
    assert 0 < abs(bits / bits_of(folder) - 1) <= 0.005
