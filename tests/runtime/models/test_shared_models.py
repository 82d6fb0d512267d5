"""What ranks read of models with experts or recurrent states, and keep of their rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Glm4MoeConfig

from runahead.runtime.checkpoint import StoredTensor, open_checkpoint
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.kernels.layers import DeltaShape, Experts, GatedDelta, Linear, Mamba2, Mamba2Shape
from runahead.runtime.kernels.share import WHOLE, Share, ShareError
from runahead.runtime.models import weights as weights_module
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import described, load_weights
from tests.runtime.kernels.recurrent_batches import Row
from tests.runtime.kernels.recurrent_mixers import by_the_reference, held_states
from tests.runtime.kernels.test_expert_shares import ranks
from tests.runtime.models.checkpoints import IDS, Case, save
from tests.runtime.models.grouped_experts import GLM4_MOE
from tests.runtime.models.shared_models import (
    EXPERTS,
    RECURRENT,
    config_of,
    layers_of,
    model_of,
    normed,
    parts_of_states,
    projected,
)

OF_AN_EXPERT = re.compile(r".*\.experts\.(\d+)\..*")
CPU = torch.device("cpu")
# A row that begins, one that goes on by a token, one that is masked, one that goes on by several.
ROWS = (Row(2, 0, 5), Row(0, 7, 1), Row(1, 3, 2, alive=False), Row(4, 9, 3))


def side_by_side(parts: tuple[tuple[Linear, ...], ...]) -> torch.Tensor:
    return torch.stack([linear.weight for part in parts for linear in part])


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_each_expert_is_exactly_one_rank_s_and_the_router_every_rank_s(architecture: str, of: int) -> None:
    config, found = config_of(architecture), 0
    for whole, *parts in layers_of(config, [WHOLE, *ranks(of)]):
        experts = [part.feed_forward for part in parts if isinstance(part.feed_forward, Experts)]
        if not isinstance(whole.feed_forward, Experts):
            continue
        found += 1
        complete = whole.feed_forward
        assert [one.share for one in experts] == ranks(of)
        assert all(one.count == complete.count and len(one.down) == complete.count // of for one in experts)
        assert torch.equal(side_by_side(tuple(one.gate_up for one in experts)), side_by_side((complete.gate_up,)))
        assert torch.equal(side_by_side(tuple(one.down for one in experts)), side_by_side((complete.down,)))
        assert all(torch.equal(one.router.weight, complete.router.weight) for one in experts)
        held = [one.shared is not None for one in experts]
        assert held == [complete.shared is not None and rank == 0 for rank in range(of)]
    assert found


@pytest.mark.parametrize("architecture", [name for name in EXPERTS if name != "GraniteMoeHybridForCausalLM"])
def test_no_tensor_of_an_expert_is_asked_for_by_two_ranks(architecture: str) -> None:
    """Granite has those of all experts in one."""
    config, asked = config_of(architecture), [list[str]() for _ in range(5)]
    for share, names in zip([WHOLE, *ranks(4)], asked, strict=True):
        model_of(config, share, names)
    whole, *parts = ([name for name in names if OF_AN_EXPERT.fullmatch(name)] for names in asked)
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert len(set(whole)) == len(whole) > 0
    for rank, part in enumerate(parts):
        numbers = {int(found[1]) for name in part if (found := OF_AN_EXPERT.fullmatch(name))}
        assert numbers == set(range(3 * rank, 3 * rank + 3))


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("architecture", RECURRENT)
def test_states_of_ranks_side_by_side_are_the_whole_s_and_their_sums_add_up(architecture: str, of: int) -> None:
    """To the bit, and the sums within rounding. Inputs are such that products do not round."""
    x, found = normed(sum(row.count for row in ROWS)), 0
    for whole, *parts in layers_of(config_of(architecture), [WHOLE, *ranks(of)]):
        if not isinstance(whole.mixer, Mamba2 | GatedDelta):
            continue
        found += 1
        states = held_states(whole.mixer)
        held = parts_of_states(whole.mixer, states, of)

        def made(mixer: Mamba2 | GatedDelta, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
            """What the mixer adds to the residual, [T, hidden], float64."""
            y = by_the_reference(mixer, projected(mixer, x), states, ROWS).double() @ mixer.out.weight.double().T
            return y if mixer.out.bias is None else y + mixer.out.bias.double()

        expected, total = made(whole.mixer, states), torch.zeros(len(x), 64, dtype=torch.float64)
        for part, own in zip(parts, held, strict=True):
            assert isinstance(part.mixer, Mamba2 | GatedDelta)
            assert [tuple(tensor.shape[1:]) for tensor in own] == list(part.mixer.keeps.state)
            total += made(part.mixer, tuple(own))
        for own, left in zip(held, parts_of_states(whole.mixer, states, of), strict=True):
            assert all(torch.equal(one, other) for one, other in zip(own, left, strict=True))
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        assert expected.abs().max() > 1.0
    assert found


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_rank_s_state_slots_have_its_heads_alone(architecture: str, of: int) -> None:
    config = config_of(architecture)
    whole = memory_of(described(config).layers)
    for share in ranks(of):
        part = memory_of(described(config, share).layers)
        both = [memory.bytes_kept(16, torch.float32, drafts=3) for memory in (part, whole)]
        assert of * both[0].row == both[1].row > both[0].row
        assert of * both[0].snapshot == both[1].snapshot
        assert of * both[0].block >= both[1].block > both[0].block, "a rank keeps the KV heads that it reads"
        caches = [memory.make_cache(2, 16, torch.float32, CPU, state_slots=3) for memory in (part, whole)]
        for mine, all_heads in zip(caches[0].states, caches[1].states, strict=True):
            assert of * mine[1].shape[1] == all_heads[1].shape[1]
            assert mine[1].shape[2:] == all_heads[1].shape[2:]


@pytest.mark.parametrize(
    ("architecture", "changes", "of", "sentence"),
    [
        ("MixtralForCausalLM", {"experts": 11}, 2, "2 ranks can't have equal parts of 11 experts"),
        ("MixtralForCausalLM", {"num_heads": 8}, 8, "8 ranks can't have equal parts of 12 experts"),
        ("GraniteMoeHybridForCausalLM", {"experts": 11}, 2, "2 ranks can't have equal parts of 11 experts"),
        ("BambaForCausalLM", {"mamba": Mamba2Shape(6, 8, 2, 16, 4)}, 4, "4 ranks .* of 2 groups of B and C"),
        ("BambaForCausalLM", {"mamba": Mamba2Shape(6, 8, 1, 16, 4)}, 2, "2 ranks .* of 1 groups of B and C"),
        (
            "Qwen3NextForCausalLM",
            {"delta": DeltaShape(2, 8, 8, 16, 3)},
            4,
            "4 ranks .* of 2 heads of keys; .* divide 2",
        ),
    ],
)
def test_what_ranks_can_t_have_in_equal_parts_is_refused_by_a_sentence(
    architecture: str, changes: dict[str, object], of: int, sentence: str
) -> None:
    with pytest.raises(ShareError, match=sentence):
        described(config_of(architecture, **changes), Share(0, of))


def test_of_a_checkpoint_s_experts_a_rank_reads_its_own_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Case("glm4_moe", Glm4MoeConfig, {**IDS, **GLM4_MOE}), tmp_path)
    tensors, checkpoint = load_file(tmp_path / "model.safetensors"), open_checkpoint(tmp_path)
    read, copy, done = list[str](), weights_module.copy_stored, list[tuple[int, int]]()

    def copy_stored(
        tensor: StoredTensor, part: torch.Tensor, rows: range | None = None, inputs: range | None = None
    ) -> None:
        assert isinstance(tensor, SafetensorsTensor)
        read.append(tensor.name)
        copy(tensor, part, rows, inputs)

    monkeypatch.setattr(weights_module, "copy_stored", copy_stored)
    weights = load_weights(
        checkpoint, load_config(checkpoint), torch.float32, CPU, lambda weight: weight, lambda *at: done.append(at),
        Share(1, 4),
    )  # fmt: skip
    assert {int(found[1]) for name in read if (found := OF_AN_EXPERT.fullmatch(name))} == {3, 4, 5}
    experts = weights.layers[1].feed_forward
    assert isinstance(experts, Experts)
    for number, linear in zip((3, 4, 5), experts.down, strict=True):
        assert torch.equal(linear.weight, tensors[f"model.layers.1.mlp.experts.{number}.down_proj.weight"])
    assert done[-1][0] == done[-1][1], "progress comes to its end"
