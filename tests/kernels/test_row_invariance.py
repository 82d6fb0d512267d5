"""A row's bits depend on that row alone: not on how many rows there are, on its place, its chunk or the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from runtime.kernels.kernel_set import RopeTable
from runtime.kernels.reference.forward import ReferenceKernels
from runtime.kernels.reference.linear import OneDnnProducts, Products, choose_products, rows_keep_their_bits
from runtime.kernels.reference.norm import add_rms_norm, rms_norm, silu_mul
from runtime.kernels.reference.rope import rope_at, rope_factors, rotate
from runtime.models.config import ModelConfig, RopeScaling
from runtime.models.decoder import Decoder
from runtime.models.self_test import RowInvarianceError, self_test
from runtime.models.weights import dummy_weights

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


# (in, out): the bundled model's products, its head, and shapes with ragged edges and sums deeper than one block.
@pytest.mark.parametrize(
    ("depth", "out"),
    [(256, 512), (256, 256), (256, 1408), (704, 256), (256, 4096), (100, 36), (1200, 130), (1024, 516)],
)
@pytest.mark.parametrize("products", [choose_products(), OneDnnProducts()], ids=["chosen", "onednn"])
def test_products(products: Products, depth: int, out: int) -> None:
    weight, bias = products.pack(_draw(out, depth)), _draw(out)
    rows = (1, 2, 3, 5, 7, 8, 9, 33, 72) if out > 2000 else (*range(1, 18), 33, 64, 71, 72, 192, 256)
    x = _draw(max(rows) + 8, depth)
    assert_rows_keep_their_bits(lambda part: products.linear(part, weight), x, rows)
    assert_rows_keep_their_bits(lambda part: products.linear(part, weight, bias), x, rows[-4:])


def test_products_are_chosen_by_trying() -> None:
    assert rows_keep_their_bits(choose_products())
    assert not rows_keep_their_bits(RowsTogether())


@pytest.mark.parametrize("width", [704, 640, 96, 37, 1300])
def test_the_gated_activation(width: int) -> None:
    assert_rows_keep_their_bits(lambda part: silu_mul(part.clone()), _draw(520, 2 * width) * 4)


@pytest.mark.parametrize("width", [256, 64, 50, 4096])
def test_norms(width: int) -> None:
    weight = _draw(width)
    x = _draw(520 if width < 4096 else 80, width)
    assert_rows_keep_their_bits(lambda part: rms_norm(part, weight, 1e-6), x)
    assert_rows_keep_their_bits(lambda part: add_rms_norm(part.clone(), part, weight, 1e-6)[0], x, (1, 2, 9, 72, 200))


@pytest.mark.parametrize(("heads", "head_dim"), [(6, 64), (3, 40), (5, 18)])
def test_rotation(heads: int, head_dim: int) -> None:
    factors = rope_factors(RopeTable(_draw(300, head_dim // 2), _draw(300, head_dim // 2)))
    position = 11

    def at_one_position(part: torch.Tensor) -> torch.Tensor:
        cos, sin = rope_at(factors, torch.full((part.shape[0],), position))
        return rotate(part, cos, sin)

    assert_rows_keep_their_bits(at_one_position, _draw(520, heads, head_dim))


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
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "eos_token_ids": (),
        "bos_token_id": None,
        "dtype": torch.float32,
    }
    config = ModelConfig(**{**shape, **changes})  # type: ignore[arg-type]
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
        {"windows": (0, 21), "qkv_bias": True, "head_dim": 40, "num_heads": 6, "num_kv_heads": 3},
        {"qk_norm": True, "intermediate_size": 1200, "hidden_size": 72, "num_kv_heads": 1, "head_dim": 32},
    ],
    ids=["llama", "windows_and_odd_heads", "qk_norm_and_deep_sums"],
)
def test_a_whole_decoder_over_rows_places_chunks_lengths_and_threads(changes: dict[str, object]) -> None:
    rows = (1, 2, 3, 5, 8, 13, 31, 72) if not changes else (1, 4, 15, 72)
    report = self_test(make_decoder(**changes), rows=rows, longest=24)
    assert report.tokens > 2500
    assert report.mixed_forwards > 20
    assert report.widest_forward > 150


def test_a_decoder_of_the_bundled_shape() -> None:
    decoder = make_decoder(hidden_size=256, intermediate_size=704, vocab_size=4096, num_layers=6, windows=(0,) * 6)
    report = self_test(decoder, rows=(1, 3, 16, 40), longest=20)
    assert report.tokens > 1000


class RowsTogether(OneDnnProducts):
    """Products that depend on the number of rows: the sum is taken from its end where there is more than one."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[0] > 1:
            x, weight = x.flip(1), weight.flip(1)
        return torch.nn.functional.linear(x, weight, bias)


class CrossingRows(ReferenceKernels):
    """A kernel set that lets one bit of a forward's first row into its last."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = super().silu_mul(gate_up)
        out[-1] += out[0] * 1e-7
        return out


@pytest.mark.parametrize(
    "kernels", [ReferenceKernels(RowsTogether()), CrossingRows()], ids=["rows_together", "crossing_rows"]
)
def test_the_self_test_fails_where_rows_know_of_each_other(kernels: ReferenceKernels) -> None:
    with pytest.raises(RowInvarianceError, match="than alone"):
        self_test(make_decoder(kernels), rows=(1, 5, 13), longest=24)
