"""A row's bits depend on that row alone: not on how many rows there are, on its place, its chunk or the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from runahead.runtime.kernels.layers import EmbeddingAndHead, Norm, RopeTable
from runahead.runtime.kernels.reference import linear as linear_module
from runahead.runtime.kernels.reference.forward import ReferenceBoundKernels, ReferenceKernels, ReferenceStream
from runahead.runtime.kernels.reference.linear import (
    OneDnnProducts,
    Products,
    RowInvarianceError,
    choose_products,
    linear,
    rows_keep_their_bits,
)
from runahead.runtime.kernels.reference.ops import NormWeight, RmsNorm, Rotation, gelu_mul, rope_factors, silu_mul
from runahead.runtime.models.cpu_check.self_test import self_test
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.rope import RopeScaling
from runahead.runtime.models.weights import dummy_weights
from tests.runtime.kernels.broken_products import RowsTogether
from tests.runtime.models.dense_configs import dense_config

QWEN2, QWEN3, QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"

ROWS = (*range(1, 73), 96, 192, 200, 256, 512)
THREADS = (1, 2, 3)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_rows_keep_their_bits(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: tuple[int, ...] = ROWS
) -> None:
    """`function` maps rows to rows. Every row of x alone on one thread, against every batch that starts anywhere."""
    torch.set_num_threads(1)
    alone = torch.cat([function(row) for row in x.split(1)])
    for threads in THREADS:
        torch.set_num_threads(threads)
        for count in rows:
            for first in {0, 3, x.shape[0] - count}:
                if first + count <= x.shape[0]:
                    got = function(x[first : first + count])
                    assert torch.equal(got, alone[first : first + count]), f"{threads=} {count=} {first=}"


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# (in, out): the bundled model's products, its head, and shapes with ragged edges and sums deeper than one part.
@pytest.mark.parametrize(
    ("depth", "out"),
    [(256, 512), (256, 256), (256, 1280), (640, 256), (256, 4096), (100, 36), (512, 36), (1200, 130), (1024, 516)],
)
@pytest.mark.parametrize("products", [choose_products(), OneDnnProducts()], ids=["chosen", "onednn"])
def test_products(products: Products, depth: int, out: int) -> None:
    weight, bias = products.pack(_draw(out, depth)), _draw(out)
    rows = (1, 2, 3, 5, 7, 8, 9, 20, 33, 72) if out > 2000 else (*range(1, 21), 24, 33, 64, 71, 72, 192, 256)
    x = _draw(max(rows) + 8, depth)
    assert_rows_keep_their_bits(lambda part: linear(products, part, weight), x, rows)
    assert_rows_keep_their_bits(lambda part: linear(products, part, weight, bias), x, rows[-4:])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("depth", "out"), [(256, 256), (640, 256), (100, 36), (1200, 130)])
@pytest.mark.parametrize("products", [choose_products(), OneDnnProducts()], ids=["chosen", "onednn"])
def test_products_added_to_what_is_there(products: Products, depth: int, out: int, with_bias: bool) -> None:
    weight, bias = _draw(out, depth), _draw(out) if with_bias else None
    product = products.bind(products.pack(weight), bias)
    multiple = products.row_multiple

    def added(x: torch.Tensor) -> torch.Tensor:
        """Each row as often as rows are padded to."""
        rows = x.repeat_interleave(multiple, dim=0)
        grown = rows[:, -1:].expand(-1, out).clone()
        product.add(products.cut(rows), grown)
        return grown[::multiple]

    x = _draw(80, depth)
    assert_rows_keep_their_bits(added, x, (1, 2, 3, 8, 10, 36, 72))
    expected = x @ weight.t() + (0 if bias is None else bias) + x[:, -1:]
    assert (added(x) - expected).abs().max() < 1e-3


def test_onednn_meets_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a compiled kernel for each, about half a MiB."""
    seen, of = set[int](), linear_module._OneDnnProduct._of

    def counted(product: linear_module._OneDnnProduct, x: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[0])
        return of(product, x)

    monkeypatch.setattr(linear_module._OneDnnProduct, "_of", counted)
    products = OneDnnProducts()
    weight = products.pack(_draw(36, 100))
    for rows in range(1, 577):
        linear(products, _draw(rows, 100), weight)
    assert len(seen) <= 31 + 9


def test_products_are_chosen_by_trying() -> None:
    assert rows_keep_their_bits(choose_products())
    assert not rows_keep_their_bits(RowsTogether())


@pytest.mark.parametrize("mul", [silu_mul, gelu_mul])
@pytest.mark.parametrize("width", [704, 640, 96, 37, 1300])
def test_the_gated_activation(width: int, mul: Callable[..., None]) -> None:
    def gated(part: torch.Tensor) -> torch.Tensor:
        out = np.empty((part.shape[0], width), np.float32)
        with np.errstate(over="ignore"):  # as in a forward: what overflows is the right zero
            mul(part.numpy()[:, :width], part.numpy()[:, width:], out)
        return torch.from_numpy(out)

    x = _draw(520, 2 * width) * 4
    assert_rows_keep_their_bits(gated, x)
    gate = x[:, :width].double()
    left = functional.silu(gate) if mul is silu_mul else functional.gelu(gate, approximate="tanh")
    expected = left * x[:, width:].double()
    assert torch.allclose(gated(x).double(), expected, rtol=1e-6 if mul is silu_mul else 1e-5, atol=1e-7)


@pytest.mark.parametrize("mul", [silu_mul, gelu_mul])
def test_a_gate_far_below_zero_is_zero_and_nan_stays_in_its_row(mul: Callable[..., None]) -> None:
    gate = np.array([[-200.0, -np.inf, 3.0], [1.0, np.nan, 2.0], [1.0, 2.0, 3.0]], np.float32)
    out = np.empty((3, 3), np.float32)
    with np.errstate(all="ignore"):
        mul(gate, np.ones((3, 3), np.float32), out)
    assert out[0, 0] == 0.0
    assert np.isnan(out).tolist() == [[False, True, False], [False, True, False], [False, False, False]]


@pytest.mark.parametrize("width", [256, 64, 50, 4096])
def test_norms(width: int) -> None:
    weight = _draw(width)

    def normed(part: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(part)
        RmsNorm.of(part.numpy(), out.numpy()).apply(NormWeight.of(Norm(weight, 1e-6)))
        return out

    x = _draw(520 if width < 4096 else 80, width)
    assert_rows_keep_their_bits(normed, x)
    scale = (x.double().square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()
    assert torch.allclose(normed(x).double(), x.double() * scale * weight.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "head_dim"), [(6, 64), (3, 40), (5, 18)])
def test_norms_of_heads_in_place(heads: int, head_dim: int) -> None:
    weight = _draw(head_dim)

    def normed(part: torch.Tensor) -> torch.Tensor:
        """The heads but the last, which is left alone."""
        whole = part.clone()
        some = whole.numpy()[:, :-1]
        RmsNorm.of(some, some).apply(NormWeight.of(Norm(weight, 1e-6)))
        assert torch.equal(whole[:, -1], part[:, -1])
        return whole

    assert_rows_keep_their_bits(normed, _draw(520, heads, head_dim))


@pytest.mark.parametrize(("heads", "head_dim"), [(6, 64), (3, 40), (5, 18)])
def test_rotation(heads: int, head_dim: int) -> None:
    cos, sin = _draw(300, head_dim // 2), _draw(300, head_dim // 2)
    table = rope_factors(RopeTable(cos, sin))
    position = 11

    def at_one_position(part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        rotation = Rotation.of(whole.numpy().reshape(-1, heads, 2, head_dim // 2))
        rotation.turn_to(table, np.full(part.shape[0], position))
        rotation.apply()
        return whole

    x = _draw(520, heads, head_dim)
    assert_rows_keep_their_bits(at_one_position, x)
    first, second = x.chunk(2, dim=2)
    expected = torch.cat(
        (first * cos[position] - second * sin[position], second * cos[position] + first * sin[position]), dim=2
    )
    assert torch.allclose(at_one_position(x), expected, atol=1e-5)


def make_decoder(kernels: ReferenceKernels | None = None, **changes: object) -> Decoder:
    shape: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": RopeScaling(),
        "windows": (0, 0),
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_ids": (),
        "bos_token_id": None,
        "dtype": torch.float32,
    }
    config = dense_config(**{**shape, **changes})  # type: ignore[arg-type]
    kernels = ReferenceKernels() if kernels is None else kernels
    weights = dummy_weights(config, torch.float32, torch.device("cpu"), kernels.pack_weight)
    return Decoder(config, weights, kernels)


def test_a_whole_decoder_with_the_products_of_other_machines() -> None:
    report = self_test(make_decoder(ReferenceKernels(OneDnnProducts())), rows=(1, 6, 30), longest=16)
    assert report.tokens > 300


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": (0, 21), "architecture": QWEN2, "head_dim": 40, "num_heads": 6, "num_kv_heads": 3},
        {
            "architecture": QWEN3,
            "intermediate_size": 1200,
            "hidden_size": 72,
            "num_kv_heads": 1,
            "head_dim": 32,
        },
        {
            "architecture": QWEN3_MOE,
            "experts": 20,
            "chosen": 9,
            "expert_size": 48,
            "renormalised": True,
            "sparse": (True, True),
        },
    ],
    ids=["llama", "windows_and_odd_heads", "qk_norm_and_deep_sums", "experts"],
)
def test_a_whole_decoder_over_rows_places_chunks_lengths_and_threads(changes: dict[str, Any]) -> None:
    rows = (1, 2, 3, 5, 8, 13, 31, 72) if not changes else (1, 4, 15, 72)
    report = self_test(make_decoder(**changes), rows=rows, longest=24)
    assert report.tokens > 2500
    assert report.mixed_forwards > 20
    assert report.widest_forward > 150


def test_a_decoder_of_the_bundled_shape() -> None:
    decoder = make_decoder(hidden_size=256, intermediate_size=704, vocab_size=4096, num_layers=6, windows=(0,) * 6)
    report = self_test(decoder, rows=(1, 3, 16, 40), longest=20)
    assert report.tokens > 1000


class CrossingRows(ReferenceKernels):
    """A kernel set that lets one bit of a forward's first row into its last."""

    def bind(self, ends: EmbeddingAndHead) -> ReferenceBoundKernels:
        return CrossingBoundKernels(ends, choose_products())


class CrossingBoundKernels(ReferenceBoundKernels):
    def end(self, stream: ReferenceStream) -> torch.Tensor:
        hidden = super().end(stream)
        if len(hidden) > 1:
            hidden[-1] += hidden[0] * 1e-7
        return hidden


@pytest.mark.parametrize(
    "kernels", [ReferenceKernels(RowsTogether()), CrossingRows()], ids=["rows_together", "crossing_rows"]
)
def test_the_self_test_fails_where_rows_know_of_each_other(kernels: ReferenceKernels) -> None:
    with pytest.raises(RowInvarianceError, match="than alone"):
        self_test(make_decoder(kernels), rows=(1, 5, 13), longest=24)
