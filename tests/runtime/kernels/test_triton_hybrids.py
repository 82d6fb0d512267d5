"""Launches of models with recurrent states by the Triton kernels, of every kind, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache  # noqa: E402
from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward import recurrent  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.kernels.triton.recurrent.tiling import LONE_RUN, STATES, StateTiling  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from tests.runtime.kernels.hybrid_configs import HALVED, HYBRIDS, hybrid  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402
from tests.runtime.kernels.test_triton_decode_streams import (  # noqa: E402
    BLOCK_SIZE,
    BLOCKS_A_ROW,
    ERROR,
    HALF,
    decoder,
    ragged_batch,
)
from tests.runtime.kernels.test_triton_exact_rows import Watched, crowds, differing  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]
LENGTHS = (31, 0, 20)
NEAR = {**ERROR, HALF: 0.1, torch.float16: 0.1}  # a near tie of a router may send a token elsewhere
STATE_SLOTS = 5
OFTEN = (
    (3, HALF, "Qwen3NextForCausalLM"),
    (3, HALF, "GraniteMoeHybridForCausalLM"),
    (1, HALF, "Qwen3NextForCausalLM"),
    (3, torch.float32, "BambaForCausalLM"),
    (3, HALF, "NemotronHForCausalLM"),
    (1, HALF, "NemotronHForCausalLM"),
    (3, torch.float16, "GraniteMoeHybridForCausalLM"),
    (3, torch.float32, "NemotronHForCausalLM"),
)
DRAFTED_OFTEN = "GraniteMoeHybridForCausalLM", HALF


def pair(architecture: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """The same model by the Triton kernels and by the reference."""
    config = hybrid(architecture)
    return decoder(config, TritonKernelSet(), dtype), decoder(config, ReferenceKernels(), torch.float32)


def launch(lengths: list[int], queries: list[int], model: Decoder) -> ForwardBatch:
    """Every row's last `queries[row]` tokens; one that is masked names the slot of another."""
    slots = torch.tensor([(3 * row + 1) % STATE_SLOTS if length else 1 for row, length in enumerate(lengths)])
    batch = ragged_batch(lengths, queries, [False] * len(lengths), model.device)
    return replace(batch, is_decode=max(queries) == 1, state_slots=slots.int().to(model.device))


def poisoned_cache(model: Decoder, rows: int, drafts: int = 0) -> KVCache:
    """Its state slots hold what is no number: rows begin with zeros all the same."""
    cache = model.make_cache(rows * BLOCKS_A_ROW + 1, BLOCK_SIZE, STATE_SLOTS, 0, drafts)
    for mixer in (*cache.states, cache.runs):
        for tensor in mixer:
            tensor.fill_(torch.nan)
    return cache


def lives(models: tuple[Decoder, ...], lengths: list[int]) -> list[list[torch.Tensor]]:
    """By each model: prompts of all rows but a token each, two decode launches, and a launch in which the first row
    decodes beside chunks of the others. What they leave of the tokens of live rows."""
    found = []
    for model in models:
        cache, rows = poisoned_cache(model, len(lengths)), len(lengths)
        hidden = []
        for further, queries in (
            (-1, [max(length - 1, 1) for length in lengths]),
            (0, [1] * rows),
            (1, [1] * rows),
            (9, [8] * rows),
            (10, [1] + [9] * (rows - 1)),
        ):
            now = [
                length + further + (row > 0) * 8 * (further == 10) if length else 0
                for row, length in enumerate(lengths)
            ]
            batch = launch(now, queries, model)
            alive = (torch.tensor(now) > 0).repeat_interleave(torch.tensor(queries))
            hidden.append(model.forward(batch, cache).cpu()[alive])
        found.append(hidden)
    return found


# Rows of a launch that verifies up to three drafts, in order: query tokens, and drafts of the launch before that are
# replayed before them. The second row begins in the last one, which has a prompt in it.
DRAFTED = (
    ((4, 1, 3), (0, 0, 0)),
    ((1, 1, 1), (2, 0, 0)),
    ((3, 1, 4), (0, 0, 0)),
    ((1, 9, 1), (2, 0, 3)),
)


def in_lines(batch: ForwardBatch) -> ForwardBatch:
    """The same query tokens as `DeviceRows.token_batch` has them: each a row."""
    counts, tokens = batch.query_start_loc.diff(), batch.num_tokens
    row = torch.arange(batch.num_rows, device=counts.device).repeat_interleave(counts)
    return replace(
        batch, query_start_loc=torch.arange(tokens + 1, dtype=torch.int32, device=counts.device),
        seq_lens=torch.where(batch.seq_lens[row] > 0, batch.positions + 1, 0).int(),
        block_tables=batch.block_tables[row], num_rows=tokens, decode_queries=1, in_rows=batch, state_slots=None,
        replayed=None, certain=None,
    )  # fmt: skip


def drafted_lives(models: tuple[Decoder, ...], lengths: list[int]) -> list[list[torch.Tensor]]:
    """By each model: prompts of all rows but a token each, and launches with drafts. What they leave of the tokens of
    live rows."""
    found = []
    for model in models:
        cache, known = poisoned_cache(model, len(lengths), drafts=3), list(lengths)
        prompts = launch([length - 1 if length else 0 for length in lengths], [max(n - 1, 1) for n in lengths], model)
        prompts = replace(prompts, replayed=torch.zeros(3, dtype=torch.int32, device=model.device))
        hidden = [model.forward(prompts, cache).cpu()[: lengths[0] - 1]]
        for number, (counts, replayed) in enumerate(DRAFTED):
            has_prompt = number == len(DRAFTED) - 1
            if has_prompt:
                known[1] = 1
            # Tokens that S has kept since: the newest one of each row, and the drafts before it.
            known = [length + again for length, again in zip(known, replayed, strict=True)]
            ends = [length + count - 1 if length else 0 for length, count in zip(known, counts, strict=True)]
            batch = launch(ends, list(counts), model)
            batch = replace(
                batch,
                token_ids=(batch.token_ids + 11 * number) % 150,
                is_decode=not has_prompt,
                decode_queries=1 if has_prompt else max(counts),
                replayed=torch.tensor(replayed, dtype=torch.int32, device=model.device),
                certain=None if has_prompt else torch.ones(3, dtype=torch.int32, device=model.device),
            )
            if isinstance(model.kernels, TritonKernelSet) and not has_prompt:
                batch = in_lines(batch)
            alive = (torch.tensor(ends) > 0).repeat_interleave(torch.tensor(counts))
            hidden.append(model.forward(batch, cache).cpu()[alive])
            known = [length + (length > 0) for length in known]
        found.append(hidden)
    return found


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == DRAFTED_OFTEN else pytest.mark.large)
        for name in HYBRIDS
        for dtype in (HALF, torch.float32)
    ],
)
def test_lives_of_rows_with_drafts(architecture: str, dtype: torch.dtype) -> None:
    found, expected = drafted_lives(pair(architecture, dtype), list(LENGTHS))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < NEAR[dtype]


def cases() -> Iterator[Any]:
    """Every architecture in one; the others are the large tests'."""
    for rows, dtype in ((3, HALF), (1, HALF), (3, torch.float32), (3, torch.float16)):
        for architecture in (*HYBRIDS, *HALVED):
            often = (rows, dtype, architecture) in OFTEN
            yield pytest.param(architecture, rows, dtype, marks=() if often else pytest.mark.large)


@pytest.mark.parametrize(("architecture", "rows", "dtype"), [*cases()])
def test_lives_of_rows(architecture: str, rows: int, dtype: torch.dtype) -> None:
    found, expected = lives(pair(architecture, dtype), list(LENGTHS[:rows]))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < NEAR[dtype]


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("BambaForCausalLM", marks=pytest.mark.large),
        "GraniteMoeHybridForCausalLM",
        "Qwen3NextForCausalLM",
    ],
)
def test_a_row_has_the_bits_that_it_has_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    with torch.inference_mode():
        watched = Watched(hybrid(architecture), 23, 64)
        assert differing(watched, crowds((1, 2, 5), 64, (20,))) == []


@pytest.mark.parametrize(("rows", "tiling"), [(1, LONE_RUN), (2, STATES)])
@pytest.mark.parametrize(
    ("architecture", "kernel"), [("Granite", "mamba2_of_decode_rows"), ("Qwen3Next", "delta_of_decode_rows")]
)
@pytest.mark.parametrize("queries", [1, 2])
def test_states_of_a_lone_row_with_drafts_are_cut_into_more_programs(
    queries: int, architecture: str, kernel: str, rows: int, tiling: StateTiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, launched = list[StateTiling](), getattr(recurrent, kernel)

    def noted(*arguments: Any, **options: Any) -> Any:
        cut.append(options["tiling"])
        return launched(*arguments, **options)

    monkeypatch.setattr(recurrent, kernel, noted)
    model, _ = pair(next(name for name in HYBRIDS if name.startswith(architecture)), HALF)
    of_rows = torch.ones(rows, dtype=torch.int32, device=model.device)
    batch = replace(
        launch([queries] * rows, [queries] * rows, model), is_decode=True, decode_queries=queries,
        replayed=of_rows - 1, certain=of_rows,
    )  # fmt: skip
    model.forward(in_lines(batch), poisoned_cache(model, rows, drafts=3))
    assert set(cut) == {tiling}
