"""A row's bits depend on that row alone: not on how many rows a launch has, where the row stands
among them, how long they are, whether they are masked or a prompt, or how long a context may be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.gpu_table.shapes import SHAPES
from runahead.cuda_graphs.buckets import buckets_for
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(900),  # kernels for every bucket are compiled first
    pytest.mark.usefixtures("matrix_units"),
]

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.kernels.triton.gemm import cublaslt as vendor  # noqa: E402
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products  # noqa: E402
from runahead.runtime.models.config.model_config import ModelConfig  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.models.weights import dummy_weights  # noqa: E402
from runahead.runtime.rounding import ceil_div  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402

HALF = torch.bfloat16
BLOCK_SIZE = 16
TOKEN = 7  # of the watched row
STATE_SLOTS = 258  # the watched row's, which is the last, and one for each of the others
EVERY_BUCKET = buckets_for(256)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who is in a launch beside the watched row. lengths: of the decode rows, 0: masked. place: of the watched row.
    prompt: tokens of a row that is a prompt, the last; 0: there is none. context: the longest that there may be."""

    lengths: tuple[int, ...] = ()
    place: int = 0
    prompt: int = 0
    context: int = 0


class Watched:
    """A row of a model with random weights, over a cache of random keys and values, in launches of all kinds."""

    def __init__(
        self, config: ModelConfig, length: int, context: int, *, kv_dtype: str = "auto", dtype: torch.dtype = HALF,
        quantize: str = "none",
    ) -> None:  # fmt: skip
        kernels = TritonKernelSet()
        weights = dummy_weights(config, dtype, DEVICE, kernels.pack_weight, quantize=quantize, kv_dtype=kv_dtype)
        self.model = Decoder(config, weights, kernels, context)
        self.length, self.context = length, context
        own = ceil_div(length, BLOCK_SIZE)
        self._own = torch.randperm(own, generator=torch.Generator().manual_seed(1)).int() + 1
        self._others = range(own + 1, own + 1 + 2 * ceil_div(context, BLOCK_SIZE))
        self.cache: KVCache = self.model.make_cache(self._others.stop, BLOCK_SIZE, STATE_SLOTS)
        generator = torch.Generator(DEVICE).manual_seed(2)
        states = [tensor for mixer in self.cache.states for tensor in mixer]
        for tensor in (*self.cache.keys, *self.cache.values, *states):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=DEVICE))
        self._states = [(tensor, tensor[-1].clone()) for tensor in states]

    def launch(self, crowd: Crowd, seed: int = 0) -> list[torch.Tensor]:
        """The watched row's logits, and the keys, values and states that it has written. seed: of what the others
        hold."""
        for tensor, held in self._states:
            tensor[-1] = held
        dice = random.Random(seed)
        rows = len(crowd.lengths) + 1 + bool(crowd.prompt)
        batch = self._batch(crowd, dice)
        with choosing_products():  # as if the launch warmed up: else no product would be the vendor's
            return self._found(batch, rows, crowd)

    def _found(self, batch: ForwardBatch, rows: int, crowd: Crowd) -> list[torch.Tensor]:
        hidden = self.model.forward(batch, self.cache)
        if not batch.is_decode:
            hidden = hidden.index_select(0, (batch.query_start_loc[1:] - 1).long())
        logits = torch.full((rows, self.model.config.vocab_size), torch.nan, device=DEVICE)
        places = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.model.kernels.logits_into(hidden, self.model.weights.lm_head, logits, places)
        block, offset = int(self._own[(self.length - 1) // BLOCK_SIZE]), (self.length - 1) % BLOCK_SIZE
        written = [tensor[block, offset] for tensor in (*self.cache.keys, *self.cache.values)]
        written += [tensor[-1] for tensor, _ in self._states]
        return [found.float().cpu().clone() for found in (logits[crowd.place], *written)]

    def _batch(self, crowd: Crowd, dice: random.Random) -> ForwardBatch:
        lengths = [*crowd.lengths[: crowd.place], self.length, *crowd.lengths[crowd.place :]]
        queries = [1] * len(lengths)
        if crowd.prompt:
            lengths.append(crowd.prompt)
            queries.append(crowd.prompt)
        context = crowd.context or self.context
        tables = torch.zeros(len(lengths), ceil_div(context, BLOCK_SIZE), dtype=torch.int32)
        for row, length in enumerate(lengths):
            blocks = (
                self._own if row == crowd.place else torch.tensor(dice.sample(self._others, len(self._others) // 2))
            )
            used = ceil_div(length, BLOCK_SIZE)
            tables[row, :used] = blocks[:used]
        counts = torch.tensor(queries)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        row_of = torch.arange(len(lengths)).repeat_interleave(counts)
        known = torch.tensor(lengths)
        positions = (known[row_of] - counts[row_of] + torch.arange(len(row_of)) - starts[row_of]).clamp_min(0)
        slots = tables[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        tokens = torch.tensor([dice.randrange(self.model.config.vocab_size) for _ in row_of])
        tokens[starts[crowd.place]] = TOKEN
        slots_of_states = torch.arange(len(lengths), dtype=torch.int32)
        slots_of_states[crowd.place] = STATE_SLOTS - 1
        return ForwardBatch(
            token_ids=tokens.to(DEVICE),
            positions=positions.to(DEVICE),
            slot_mapping=(slots * (known[row_of] > 0)).to(DEVICE),
            query_start_loc=starts.int().to(DEVICE),
            seq_lens=known.int().to(DEVICE),
            block_tables=tables.to(DEVICE),
            num_tokens=len(row_of),
            num_rows=len(lengths),
            max_seq_len=context,
            is_decode=not crowd.prompt,
            state_slots=slots_of_states.to(DEVICE),
        )


def crowds(buckets: tuple[int, ...], context: int, prompts: tuple[int, ...]) -> Iterator[Crowd]:
    """Every bucket with the row at a random place among others of random lengths, some of them masked; beside prompts;
    and with a longer context."""
    dice = random.Random(3)

    def lengths(count: int) -> tuple[int, ...]:
        return tuple(dice.choice([0, dice.randint(1, context), dice.randint(1, context)]) for _ in range(count))

    for rows in buckets:
        yield Crowd(lengths(rows - 1), dice.randrange(rows))
    for prompt in prompts:
        for rows in (1, buckets[-1] - 1):
            yield Crowd(lengths(rows - 1), dice.randrange(rows), prompt)
    yield Crowd(context=8 * context)
    yield Crowd(lengths(buckets[-1] - 1), 0, context=8 * context)


def differing(watched: Watched, found: Iterator[Crowd]) -> list[Crowd]:
    """In which crowds the row has other bits than alone. Raises AssertionError for bits that are no numbers."""
    alone = watched.launch(Crowd())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in alone)
    assert len(alone[0].unique()) > 10, "as if the row had no logits"
    return [
        crowd for seed, crowd in enumerate(found, 1) if not all(map(torch.equal, watched.launch(crowd, seed), alone))
    ]


SMALL = gpu_chain.small_config(
    architecture="Qwen3ForCausalLM", windows=(0, 24), hidden_size=128, head_dim=32, intermediate_size=192
)


@pytest.mark.parametrize("length", [23, *(pytest.param(length, marks=pytest.mark.large) for length in (1, 40))])
def test_a_small_model_s_row_has_the_bits_that_it_has_alone(length: int) -> None:
    watched = Watched(SMALL, length, 64)
    assert differing(watched, crowds((1, 2, 5), 64, (20,))) == []


def test_a_row_with_fp8_keys_and_values_has_the_bits_that_it_has_alone() -> None:
    watched = Watched(SMALL, 23, 64, kv_dtype="fp8")
    assert watched.cache.keys[0].dtype == torch.float8_e4m3fn
    assert differing(watched, crowds((1, 2, 5), 64, (20,))) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_in_another_dtype_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    assert differing(Watched(SMALL, 23, 64, dtype=dtype), crowds((1, 2, 5), 64, (20,))) == []


def test_a_row_has_them_where_no_tile_divides_what_products_sum() -> None:
    odd = replace(SMALL, hidden_size=96, head_dim=24, intermediate_size=100)
    assert differing(Watched(odd, 23, 64), crowds((1, 2, 5), 64, (20,))) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_of_a_real_shape_in_another_dtype_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    real = SHAPES["0.6B"]
    config = replace(real, keys={**real.keys, "num_hidden_layers": 2}).described()
    assert differing(Watched(config, 613, 2048, dtype=dtype), crowds(EVERY_BUCKET, 2048, (100,))) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "length"), [("0.6B", 130), ("8B", 1999)])
def test_a_row_of_a_real_shape_with_fp8_keys_and_values_has_the_bits_that_it_has_alone(shape: str, length: int) -> None:
    real = SHAPES[shape]
    config = replace(real, keys={**real.keys, "num_hidden_layers": 2}).described()
    watched = Watched(config, length, 2048, kv_dtype="fp8")
    assert differing(watched, crowds(EVERY_BUCKET, 2048, (2, 100, 256))) == []


@pytest.mark.large
def test_a_small_model_s_row_has_them_in_every_bucket() -> None:
    buckets = EVERY_BUCKET if DEVICE.type == "cuda" else (1, 8, 64, 96)
    watched = Watched(SMALL, 61, 64)
    assert differing(watched, crowds(buckets, 64, (2, 50))) == []


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 130, 613, 1999])
@pytest.mark.parametrize("shape", ["0.6B", "1B", "8B"])
def test_a_row_of_a_real_shape_has_the_bits_that_it_has_alone(shape: str, length: int) -> None:
    real = SHAPES[shape]
    config = replace(real, keys={**real.keys, "num_hidden_layers": 2}).described()
    watched = Watched(config, length, 2048)
    assert differing(watched, crowds(EVERY_BUCKET, 2048, (2, 100, 256))) == []


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["0.6B", "8B"])
def test_a_row_of_a_real_shape_has_them_among_hundreds(shape: str) -> None:
    real = SHAPES[shape]
    config = replace(real, keys={**real.keys, "num_hidden_layers": 2}).described()
    watched = Watched(config, 613, 2048)
    assert differing(watched, crowds((384, 1024), 2048, (100,))) == []


def split_library(monkeypatch: pytest.MonkeyPatch) -> vendor.VendorLibrary:
    """The vendor's library, which may split products along their depth."""
    path = vendor.library_path()
    assert path is not None
    library = vendor.VendorLibrary(path, split_k=True)
    monkeypatch.setattr(vendor, "vendor_library", lambda: library)
    return library


def layers_of_8b(count: int) -> ModelConfig:
    real = SHAPES["8B"]
    return replace(real, keys={**real.keys, "num_hidden_layers": count}).described()


@pytest.mark.gpu
def test_kernels_of_the_library_that_split_the_depth_are_found_and_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    library = split_library(monkeypatch)
    watched = Watched(layers_of_8b(2), 130, 2048)
    assert differing(watched, crowds(EVERY_BUCKET, 2048, (100,))) == []
    asked = [pinned for pinned in library.pinned.values() if pinned is not None]
    assert any(len(pinned.exact) < len(pinned.candidates) for pinned in asked), "no kernel had other bits"
    assert all(pinned.choice in pinned.exact for pinned in asked if pinned.exact)


@pytest.mark.gpu
def test_a_product_that_is_split_along_its_depth_shows_in_a_row_s_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests before would show nothing."""
    library = split_library(monkeypatch)
    seen = library.product
    monkeypatch.setattr(library, "product", lambda x, linear, out, chain=None: seen(x, linear, out))
    watched = Watched(layers_of_8b(2), 130, 2048)
    assert differing(watched, crowds(EVERY_BUCKET, 2048, (100,))) != []
