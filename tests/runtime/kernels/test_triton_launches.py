"""What F leaves and what penalties do, in Triton against the reference program, over the same launches by hand."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.buckets import Buckets, GraphKey, Piece  # noqa: E402
from runahead.cuda_graphs.device import Form, LaunchShape  # noqa: E402
from runahead.cuda_graphs.rings import RingMemory, allocate_rings  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams  # noqa: E402
from tests.gpu import gpu_chain, launch_scenarios  # noqa: E402
from tests.runtime.kernels.poisoned_program import PoisonedProgram  # noqa: E402
from tests.runtime.launches import as_captured, over_program  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.timeout(600),  # whole launches in Triton's interpreter take their time
]


TOKENS = (32, 64, launch_scenarios.MAX_TOKENS)
BUCKETS = Buckets((launch_scenarios.ROWS,), (launch_scenarios.ROWS,), TOKENS, TOKENS)


def make_decoder() -> Decoder:
    config = launch_scenarios.CONFIG
    return Decoder(config, gpu_chain.moved(gpu_chain.random_weights(config), DEVICE), TritonKernelSet())


def make_rings() -> RingMemory:
    if DEVICE.type == "cuda":
        from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

        return allocate_mapped_rings(launch_scenarios.LAYOUT)
    return allocate_rings(launch_scenarios.LAYOUT)


def make_program(decoder: Decoder, rings: RingMemory) -> PoisonedProgram:
    return PoisonedProgram(
        decoder,
        rings,
        max_rows=launch_scenarios.ROWS,
        max_tokens=launch_scenarios.MAX_TOKENS,
        num_blocks=launch_scenarios.NUM_BLOCKS,
        block_size=launch_scenarios.BLOCK_SIZE,
        context_length=launch_scenarios.CONTEXT,
        penalty_slots=launch_scenarios.PENALTY_SLOTS,
    )


def triton_stage(padded: Counter[GraphKey] | None = None) -> launch_scenarios.Stage:
    """Triton kernels launched one by one, no graph. padded: launches run in the shapes of their graphs, over buffers in
    which an earlier launch has left nonsense, and are counted here."""
    rings = make_rings()
    program = make_program(make_decoder(), rings)
    run_all = over_program(program)
    if padded is not None:
        run_all = as_captured(run_all, BUCKETS, padded)

    def run(shape: LaunchShape) -> None:
        if padded is not None:
            queries = program.rows.queries
            for left in (queries.token_ids, queries.positions, queries.slot_mapping, queries.seq_lens):
                left.fill_(1 << 30)
        run_all(shape)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    launches = launch_scenarios.make_launches(run, rings)
    return launch_scenarios.Stage(
        launches, program.poison_blocks, program.poison_penalty_slot, launch_scenarios.lists_samples_of(program)
    ).spoil()


def test_a_row_that_s_holds_back_keeps_its_logits_over_the_launches_of_others() -> None:
    expected = launch_scenarios.held_back(launch_scenarios.reference_stage(), 0)
    assert set(expected) == {1, 4}
    for stage in (launch_scenarios.reference_stage(), triton_stage()):
        assert launch_scenarios.held_back(stage, 2) == expected


def mixed(padded: Counter[GraphKey]) -> int:
    return sum(count for key, count in padded.items() if key.piece is Piece.MIXED)


@pytest.mark.parametrize("in_graphs", [False, True], ids=["launched", "padded"])
def test_penalised_rows_have_the_tokens_of_the_reference(in_graphs: bool) -> None:
    padded = Counter[GraphKey]()
    found = launch_scenarios.penalised(triton_stage(padded if in_graphs else None))
    assert found == launch_scenarios.penalised(launch_scenarios.reference_stage())
    assert found["penalised"] != found["free"], "the penalties changed nothing"
    assert (mixed(padded) >= 3) == in_graphs


def test_rows_in_the_shapes_of_graphs_fail_alone_too() -> None:
    padded = Counter[GraphKey]()
    launch_scenarios.flags_are_right(launch_scenarios.flags(triton_stage(padded)))
    assert mixed(padded) >= 3


def chunks_of_odd_sizes(stage: launch_scenarios.Stage) -> list[tuple[dict[int, int], dict[int, bool]]]:
    """Tokens and flags of launches that fill a bucket of 32 query tokens, miss it by one on either side, and more."""
    launches = stage.launches
    for slot in range(launch_scenarios.ROWS):
        sampling = SamplingParams(temperature=0.0 if slot % 2 else 0.9, seed=slot)
        launches.begin(slot, launch_scenarios.prompt_of(40 + slot, slot), sampling)
    work: tuple[dict[int, int], ...] = (
        {1: 32}, {0: 31}, {0: 13, 3: 17, 1: 1}, {1: 100, 4: 23}, {1: 1, 0: 1, 2: 31}, {0: 1, 1: 1, 2: 1, 3: 30},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 28}, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, {},
    )  # fmt: skip
    outcomes = [launches.launch(each, Form.PLAIN) for each in work]
    return [(outcome.tokens, outcome.finite) for outcome in outcomes]


def test_chunks_of_odd_sizes_beside_decode_rows_have_the_tokens_of_the_reference() -> None:
    padded = Counter[GraphKey]()
    found = chunks_of_odd_sizes(triton_stage(padded))
    assert found == chunks_of_odd_sizes(launch_scenarios.reference_stage())
    assert {key.tokens for key in padded} >= {0, 32, 64}


def test_a_nan_in_one_row_s_cache_shows_in_its_own_flag_only() -> None:
    for stage in (launch_scenarios.reference_stage(), triton_stage()):
        launch_scenarios.flags_are_right(launch_scenarios.flags(stage))


def test_prompt_log_probabilities_are_those_of_the_reference() -> None:
    """Beside padding of rows and of query tokens, as a device enqueues them, and without any."""
    expected = launch_scenarios.prompt_entries(launch_scenarios.reference_stage(), [], ())
    for cuts, neighbours, padded in (([40], (0, 1, 4), Counter[GraphKey]()), ([1, 33], (), None)):
        found = launch_scenarios.prompt_entries(triton_stage(padded), cuts, neighbours)
        launch_scenarios.entries_agree(found, expected, 2e-5)


def test_nothing_holds_the_pool_of_a_program_that_is_gone() -> None:
    """A start tries the largest launches with a program that it gives back, with the same model."""
    decoder, rings = make_decoder(), make_rings()
    program = make_program(decoder, rings)
    launches = launch_scenarios.make_launches(over_program(program), rings)
    launches.begin(0, launch_scenarios.prompt_of(40, 0), SamplingParams(temperature=0.0))
    for tokens in (40, 1, 1):
        launches.launch({0: tokens}, Form.PLAIN)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    pool = weakref.ref(program._cache.keys[0])
    assert pool() is not None
    del program, launches
    gc.collect()
    assert pool() is None
