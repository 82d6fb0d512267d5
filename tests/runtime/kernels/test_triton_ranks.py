"""A model that two ranks have between them, by the kernels of GPUs: whole launches, S, apply and F, in Triton's
interpreter or on one GPU. The ranks are threads that take turns; what they exchange goes through the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, NemotronHConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("matrix_units"),
    # Of query tokens that are none: rows without drafts beside rows with some.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

from runahead.cuda_graphs.rings import RingLayout  # noqa: E402
from runahead.runtime.checkpoint import open_checkpoint  # noqa: E402
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.load import load_model  # noqa: E402
from runahead.runtime.models.read_config import load_config  # noqa: E402
from runahead.runtime.plan import PLAN_WORDS  # noqa: E402
from runahead.runtime.programs.cuda.draft_model import load_drafter  # noqa: E402
from runahead.runtime.programs.cuda.program import TritonProgram  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams  # noqa: E402
from tests.runtime.kernels.device_twin import mapped_rings  # noqa: E402
from tests.runtime.kernels.divided_programs import Divided  # noqa: E402
from tests.runtime.kernels.head_on_triton import files_of  # noqa: E402
from tests.runtime.launches import Launches, over_program  # noqa: E402
from tests.runtime.models import eagle3_heads, eagle_heads  # noqa: E402
from tests.runtime.models.checkpoints import CASES, IDS, Case, save  # noqa: E402

RANKS, ROWS, BLOCK_SIZE, EACH, MAX_TOKENS, DRAFTS = 2, 3, 16, 3, 64, 2
VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16,
    "num_key_value_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_MAMBA2 = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention"], "num_hidden_layers": 3, "mamba_num_heads": 4,
    "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "time_step_min": 0.2,
}  # fmt: skip
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_num_value_heads": 4, "linear_value_head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
MODELS = {
    "dense": Case("dense", Qwen3Config, SHAPE, torch.bfloat16),
    "experts": Case(
        "experts",
        Qwen3MoeConfig,
        {**SHAPE, **IDS, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        torch.bfloat16,
    ),
    "shared expert": Case("shared expert", Glm4MoeConfig, {**SHAPE, **IDS, **_ROUTED}, torch.bfloat16),
    "mamba-2 and feed-forwards without gates": Case(
        "nemotron_h", NemotronHConfig, {**SHAPE, **IDS, **_MAMBA2}, torch.bfloat16
    ),
    "gated delta nets and experts": Case("qwen3_next", Qwen3NextConfig, {**SHAPE, **IDS, **_DELTA}, torch.bfloat16),
}
GREEDY = SamplingParams(temperature=0.0)
TOLERANCE = 0.03  # of bfloat16, by the norm: partial sums are rounded on each rank


@pytest.fixture(params=MODELS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save(MODELS[request.param], made)
    return made


def program_of(folder: Path, ranks: Ranks, rings: Any) -> TritonProgram:
    """With a head on the first rank, if the folder has one."""
    has_head, context = (folder / "head").exists() and ranks.shard.is_first, EACH * BLOCK_SIZE
    checkpoint = open_checkpoint(folder / "target" if (folder / "target").exists() else folder)
    files = files_of(folder, checkpoint, load_config(checkpoint), context) if has_head else None
    model = load_model(
        checkpoint, DEVICE, torch.bfloat16, "auto", TritonKernelSet(), None, context, None, ranks,
        shared=() if files is None else files.shared(load_config(checkpoint)),
    )  # fmt: skip
    head = None if files is None else load_drafter(files, model, context, drawn=False)
    return TritonProgram(
        model, rings, max_rows=ROWS, max_tokens=MAX_TOKENS, num_blocks=ROWS * EACH + 1, block_size=BLOCK_SIZE,
        context_length=context, drafts=DRAFTS, draft_rows=ROWS, head=head,
    )  # fmt: skip


def make_rings() -> Any:
    layout = RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, drafts=DRAFTS, prompt_tokens=MAX_TOKENS)
    return mapped_rings(layout, DEVICE)


def divided_on(folder: Path) -> Divided:
    first = make_rings()
    rings = [first, *(replace(make_rings(), plan=first.plan, bulk=first.bulk) for _ in range(1, RANKS))]
    return Divided(rings, lambda ranks, own: program_of(folder, ranks, own), is_on_gpu=DEVICE.type == "cuda")


# Tokens that each row takes in each launch: prompts whole and in chunks, beside rows that decode; then all decode.
WORK = ({0: 20}, {0: 1, 1: 4}, {0: 1, 1: 10}, {0: 1, 1: 1})


def begun(run: Any, rings: Any, program: TritonProgram) -> Launches:
    keeps_states = any(layer.mixer is not None and layer.mixer.keeps.state for layer in program._model.weights.layers)
    launches = Launches(run, rings, VOCAB, EACH, 0 if keeps_states else None)
    launches.begin(0, [3 + 11 * i % 150 for i in range(9)], GREEDY)
    launches.begin(1, [5 + 7 * i % 150 for i in range(7)], GREEDY)
    return launches


def test_two_ranks_have_the_logits_of_the_whole_model_and_the_same_rows(folder: Path) -> None:
    whole_rings, divided = make_rings(), divided_on(folder)
    whole = program_of(folder, ONE_RANK, whole_rings)
    one, both = begun(over_program(whole), whole_rings, whole), begun(divided.run, divided.rings, whole)
    compared = 0
    for work in WORK:
        one.launch(work)
        both.launch(work)
        first, second = (program.rows for program in divided.programs)
        for name in ("last_token", "seq_len", "alive"):
            assert torch.equal(getattr(first.state, name), getattr(second.state, name)), name
        for slot in work:
            expected = whole._logits[slot]
            found = torch.cat([program._logits[slot] for program in divided.programs])
            if expected.abs().max() > 0:
                compared += 1
                assert float((expected - found).norm() / expected.norm()) < TOLERANCE
    assert compared >= len(WORK)


# What a rank drafts, and what it gives the others, is the same whatever the layers are, but for states.
@pytest.mark.parametrize(
    "folder",
    [pytest.param(name, marks=() if name in ("dense", list(MODELS)[-1]) else pytest.mark.large) for name in MODELS],
    indirect=True,
)
def test_drafts_of_the_first_rank_are_those_of_all(folder: Path) -> None:
    divided = divided_on(folder)
    launches = begun(divided.run, divided.rings, divided.programs[0])
    for work in WORK[:3]:
        launches.launch(work)
    for _ in range(3):
        launches.launch({0: 1, 1: 1}, drafts=DRAFTS)
        first, second = (program.rows for program in divided.programs)
        assert first.drafts is not None and second.drafts is not None
        slots = slice(0, 2)
        assert torch.equal(first.drafts.drafted[slots], second.drafts.drafted[slots])
        assert torch.equal(first.drafts.proposed[slots], second.drafts.proposed[slots])
        assert torch.equal(first.state.seq_len, second.state.seq_len)
        assert torch.equal(first.drafts.token_ids, second.drafts.token_ids)


def test_a_head_of_the_first_rank_drafts_tokens_of_every_rank(tmp_path: Path) -> None:
    """One that is always right, with the embedding and the head of the whole model: every rank verifies its drafts."""
    eagle_heads.save_foreseen(tmp_path / "target", tmp_path / "head")
    divided = divided_on(tmp_path)
    launches = begun(divided.run, divided.rings, divided.programs[0])
    for work in WORK[:3]:
        launches.launch(work)
    launches.launch({0: 1, 1: 1}, drafts=DRAFTS)
    runs = [launches.launch({0: 1, 1: 1}, drafts=DRAFTS).runs for _ in range(2)]
    said = [cell.token for run in runs for cells in run.values() for cell in cells]
    assert len(said) == len(runs) * 2 * (1 + DRAFTS), "a draft was not accepted"
    assert {token * RANKS // VOCAB for token in said} == set(range(RANKS))
    assert [program.rows.drafts.has_drafter for program in divided.programs if program.rows.drafts] == [False] * RANKS


def test_a_head_of_the_first_rank_reads_what_layers_of_all_ranks_leave(tmp_path: Path) -> None:
    save(CASES[0], tmp_path / "target")
    eagle3_heads.write_head3(tmp_path / "head", eagle3_heads.random_head(), draft_vocab_size=eagle3_heads.KNOWN)
    whole_rings, divided = make_rings(), divided_on(tmp_path)
    whole = program_of(tmp_path, ONE_RANK, whole_rings)
    for launches in (begun(over_program(whole), whole_rings, whole), begun(divided.run, divided.rings, whole)):
        for work in WORK:
            launches.launch(work)
    expected, found = (program._head._cache for program in (whole, divided.programs[0]) if program._head is not None)
    assert float(expected.hidden.norm()) > 0
    assert relative_error(found.hidden, expected.hidden.float()) < TOLERANCE
    pairs = zip(
        (*found.entries.keys, *found.entries.values), (*expected.entries.keys, *expected.entries.values), strict=True
    )
    assert all(relative_error(own, theirs.float()) < TOLERANCE for own, theirs in pairs)
