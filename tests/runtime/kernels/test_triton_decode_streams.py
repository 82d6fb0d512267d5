"""A whole model's launches, with every number of rows and in every dtype, against the reference in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.runtime.kernels.matrix_units import multiply_as_matrix_units
from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache  # noqa: E402
from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward import decode  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.blocks.dense import DenseConfig  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402

HALF = torch.bfloat16
LLAMA, QWEN3, GEMMA2 = "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"
BLOCK_SIZE, BLOCKS_A_ROW = 8, 6
ERROR = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def batch_of(lengths: list[int], queries: int, device: torch.device) -> ForwardBatch:
    """Every row's last `queries` tokens; a row of length 0 is masked."""
    rows = len(lengths)
    tables = torch.arange(1, rows * BLOCKS_A_ROW + 1, dtype=torch.int32).view(rows, BLOCKS_A_ROW)
    positions = torch.tensor([max(n - queries + i, 0) for n in lengths for i in range(queries)])
    row = torch.arange(rows).repeat_interleave(queries)
    slots = tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    alive = torch.tensor(lengths).repeat_interleave(queries) > 0
    return ForwardBatch(
        token_ids=(torch.arange(rows * queries) * 7 % 150).to(device),
        positions=positions.to(device),
        slot_mapping=(slots * alive).to(device),
        query_start_loc=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32).to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        block_tables=tables.to(device),
        num_tokens=rows * queries,
        num_rows=rows,
        max_seq_len=BLOCK_SIZE * BLOCKS_A_ROW,
        is_decode=queries == 1,
    )


def ragged_batch(lengths: list[int], queries: list[int], decodes: list[bool], device: torch.device) -> ForwardBatch:
    """Every row's last `queries[row]` tokens; a row of length 0 is masked."""
    rows, starts = len(lengths), [0]
    tables = torch.arange(1, rows * BLOCKS_A_ROW + 1, dtype=torch.int32).view(rows, BLOCKS_A_ROW)
    positions, slots = [], []
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        here = [max(length - count + i, 0) for i in range(count)]
        positions += here
        slots += [int(tables[row, n // BLOCK_SIZE]) * BLOCK_SIZE + n % BLOCK_SIZE if length else 0 for n in here]
        starts.append(starts[-1] + count)
    return ForwardBatch(
        token_ids=(torch.tensor(positions) * 7 % 150).to(device),
        positions=torch.tensor(positions).to(device),
        slot_mapping=torch.tensor(slots).to(device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32).to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        block_tables=tables.to(device),
        num_tokens=starts[-1],
        num_rows=rows,
        max_seq_len=BLOCK_SIZE * BLOCKS_A_ROW,
        is_decode=False,
    )


def of_dtype(weights: Any, dtype: torch.dtype) -> Any:
    """Weights of 16 bits in another dtype."""
    if isinstance(weights, torch.Tensor):
        return weights.to(dtype) if weights.dtype == HALF else weights
    if isinstance(weights, tuple):
        return tuple(of_dtype(item, dtype) for item in weights)
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        changes = {field.name: of_dtype(getattr(weights, field.name), dtype) for field in dataclasses.fields(weights)}
        return dataclasses.replace(weights, **changes)
    return weights


def decoder(config: DenseConfig, kernels: ReferenceKernels | TritonKernelSet, dtype: torch.dtype) -> Decoder:
    """With the same weights, rounded to 16 bits, whatever the dtype and the kernels."""
    weights = of_dtype(gpu_chain.random_weights(config, HALF), dtype)
    if isinstance(kernels, TritonKernelSet):
        weights = gpu_chain.moved(weights, DEVICE)
    return Decoder(config, weights, kernels)


@pytest.mark.parametrize(
    ("architecture", "rows", "dtype"),
    [
        (LLAMA, 1, HALF),
        (QWEN3, 1, torch.float32),
        (QWEN3, 9, HALF),
        (LLAMA, 3, torch.float32),
        (QWEN3, 3, torch.float16),
        *(
            pytest.param(*case, marks=pytest.mark.large)
            for case in (
                (QWEN3, 1, HALF),
                (LLAMA, 2, HALF),
                (LLAMA, 1, torch.float16),
                (LLAMA, 9, torch.float32),
                (QWEN3, 9, torch.float16),
            )
        ),
    ],
)
def test_decode_launches_of_so_many_rows(
    rows: int, dtype: torch.dtype, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    biases = {"attention_bias": True, "mlp_bias": True} if architecture == LLAMA else {}
    config = gpu_chain.small_config(architecture=architecture, windows=(0, 24), intermediate_size=128, **biases)
    models = [decoder(config, TritonKernelSet(), dtype), decoder(config, ReferenceKernels(), torch.float32)]
    lengths = [33, 0, 20, 25, 31, 39, 17, 18, 19][:rows]
    hidden: list[list[torch.Tensor]] = []
    for model in models:
        cache: KVCache = model.make_cache(len(lengths) * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        prompts = batch_of([max(n - 1, 0) for n in lengths], 16, model.device)
        found = [model.forward(prompts, cache)]
        for further in range(2):
            batch = batch_of([n + further if n else 0 for n in lengths], 1, model.device)
            found.append(model.forward(batch, cache))
        hidden.append(found)
    alive = torch.tensor(lengths) > 0
    for launch in (1, 2):
        assert relative_error(hidden[0][launch].cpu()[alive], hidden[1][launch][alive]) < ERROR[dtype]


@pytest.mark.parametrize("architecture", [LLAMA, QWEN3])
def test_launches_of_decode_rows_and_chunks(architecture: str) -> None:
    """Decode rows, chunks and a masked row in one launch; then decode rows alone."""
    torch.manual_seed(2)
    config = gpu_chain.small_config(architecture=architecture, windows=(0, 24), intermediate_size=128)
    models = [decoder(config, TritonKernelSet(), HALF), decoder(config, ReferenceKernels(), torch.float32)]
    decodes, lengths, queries = [True, False, False, True, True], [33, 21, 17, 0, 28], [1, 9, 1, 1, 1]
    hidden: list[list[torch.Tensor]] = []
    for model in models:
        cache: KVCache = model.make_cache(len(lengths) * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        before = [max(n - count, 1) for n, count in zip(lengths, queries, strict=True)]
        model.forward(ragged_batch(before, before, [False] * 5, model.device), cache)
        found = [model.forward(ragged_batch(lengths, queries, decodes, model.device), cache)]
        found.append(model.forward(batch_of([n + 1 if n else 0 for n in lengths], 1, model.device), cache))
        hidden.append(found)
    for launch, counts in ((0, queries), (1, [1] * 5)):
        alive = (torch.tensor(lengths) > 0).repeat_interleave(torch.tensor(counts))
        assert relative_error(hidden[0][launch].cpu()[alive], hidden[1][launch][alive]) < ERROR[HALF]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_float16_takes_what_it_could_not_hold_before_a_norm() -> None:
    """The residual times the norm's weight is beyond 65,504, and its norm is not. Nobody reads what overflows."""
    config = gpu_chain.small_config(architecture=LLAMA, windows=(0, 24), intermediate_size=128)
    found = []
    for kernels, dtype in ((TritonKernelSet(), torch.float16), (ReferenceKernels(), torch.float32)):
        model = decoder(config, kernels, dtype)
        model.weights.embedding.mul_(2000.0 / float(model.weights.embedding.abs().max()))
        for layer in model.weights.layers:
            assert layer.mixer is not None and layer.mixer.norm is not None
            layer.mixer.norm.weight.mul_(100.0)
        cache = model.make_cache(2 * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        found.append(model.forward(batch_of([1, 1], 1, model.device), cache).cpu())
    assert bool(found[0].isfinite().all())
    assert relative_error(found[0], found[1]) < 2e-2


@pytest.mark.parametrize("architecture", [LLAMA, QWEN3, GEMMA2])
def test_products_and_what_follows_them_have_the_same_bits_in_one_kernel_and_in_two(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a decode launch and in a mixed one: our kernels that do all at once; sums, and then what follows them, for
    products without a norm; and so for all."""
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    torch.manual_seed(6)
    own: dict[str, Any] = {
        LLAMA: {"attention_bias": True, "mlp_bias": True},
        GEMMA2: {"query_pre_attn_scalar": 20.0, "score_cap": 0.5, "logit_cap": 1.5},
    }
    config = gpu_chain.small_config(architecture=architecture, intermediate_size=128, **own.get(architecture, {}))
    lengths, queries = [33, 21, 17], [1, 9, 1]
    found = []
    for one_sum, most_fused in ((False, 64), (True, 64), (True, 0)):
        monkeypatch.setattr(decode, "is_one_sum", lambda *sizes, one_sum=one_sum: one_sum)
        monkeypatch.setattr(decode, "MAX_ROWS", most_fused)
        model = decoder(config, TritonKernelSet(), HALF)
        cache = model.make_cache(len(lengths) * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        model.forward(ragged_batch(before := [32, 12, 16], before, [False] * 3, model.device), cache)
        found.append(
            (
                model.forward(ragged_batch(lengths, queries, [True, False, True], model.device), cache),
                model.forward(batch_of([n + 1 for n in lengths], 1, model.device), cache),
            )
        )
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)
