"""What ranks read of models with experts or recurrent states, and keep of their rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.kernels.layers import DeltaShape, Experts, GatedDelta, Linear, Mamba2, Mamba2Shape, Ungated
from runahead.runtime.kernels.ranks import WHOLE, Shard, ShardError
from runahead.runtime.models import weights as weights_module
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import described, dummy_weights, load_weights
from tests.gpu.gpu_chain import small_config
from tests.runtime.kernels.hybrid_configs import HALVED
from tests.runtime.kernels.recurrent_batches import Row
from tests.runtime.kernels.recurrent_mixers import by_the_reference, held_states
from tests.runtime.kernels.test_expert_shares import ranks
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.shared_models import (
    EXPERTS,
    RECURRENT,
    config_of,
    layers_of,
    normed,
    parts_of_states,
    projected,
)

OF_EXPERTS = re.compile(r"experts?\.|block_sparse_moe\.(in|out)put|shared_mlp")
CPU = torch.device("cpu")
# A row that begins, one that goes on by a token, one that is masked, one that goes on by several.
ROWS = (Row(2, 0, 5), Row(0, 7, 1), Row(1, 3, 2, alive=False), Row(4, 9, 3))


def halves_of(first: Linear, last: Linear) -> list[torch.Tensor]:
    """Gate and up, or what a feed-forward has in their place, of its first product."""
    pieces = len(first.weight) // last.weight.shape[1]
    return list(first.weight.chunk(pieces))


def check_widths(whole: tuple[Linear, Linear], parts: list[tuple[Linear, Linear]]) -> None:
    """The first and the last product of a feed-forward are the ranks' side by side."""
    side_by_side = [torch.cat(halves) for halves in zip(*(halves_of(*part) for part in parts), strict=True)]
    assert torch.equal(torch.cat(side_by_side), whole[0].weight)
    assert torch.equal(torch.cat([last.weight for _, last in parts], 1), whole[1].weight)
    if whole[0].bias is not None:
        assert torch.equal(torch.cat([first.bias for first, _ in parts if first.bias is not None]), whole[0].bias)
    assert [last.bias is not None for _, last in parts] == [
        whole[1].bias is not None and rank == 0 for rank in range(len(parts))
    ], "a bias is added once"


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_ranks_divide_the_width_of_each_expert_and_have_the_same_router(architecture: str, of: int) -> None:
    found = 0
    for whole, *parts in layers_of(config_of(architecture), [WHOLE, *ranks(of)]):
        complete, own = whole.feed_forward, [part.feed_forward for part in parts]
        if not isinstance(complete, Experts):
            continue
        found += 1
        experts = [one for one in own if isinstance(one, Experts)]
        for number, both in enumerate(zip(complete.gate_up, complete.down, strict=True)):
            check_widths(both, [(one.gate_up[number], one.down[number]) for one in experts])
        assert all(torch.equal(one.router.weight, complete.router.weight) for one in experts)
        if complete.shared is not None:
            shared = [one.shared for one in experts if one.shared is not None]
            check_widths((complete.shared.gate_up, complete.shared.down), [(one.gate_up, one.down) for one in shared])
            if complete.shared.gate is not None:
                assert all(one.gate is not None and torch.equal(one.gate, complete.shared.gate) for one in shared)
    assert found


@pytest.mark.parametrize("bias", [False, True])
def test_ranks_divide_the_width_of_feed_forwards_without_gates(bias: bool) -> None:
    halved = {**HALVED["NemotronHForCausalLM"], "pattern": "*-*-", "recurrent": (False,) * 4, "mlp_bias": bias}
    config = small_config(architecture="NemotronHForCausalLM", **halved)
    for whole, *parts in layers_of(config, [WHOLE, *ranks(2)]):
        if isinstance(whole.feed_forward, Ungated):
            ungated = [part.feed_forward for part in parts if isinstance(part.feed_forward, Ungated)]
            check_widths((whole.feed_forward.up, whole.feed_forward.down), [(one.up, one.down) for one in ungated])


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_random_experts_are_the_same_numbers_for_any_number_of_ranks(architecture: str, of: int) -> None:
    config = config_of(architecture)
    whole, *parts = (
        dummy_weights(config, torch.float32, CPU, lambda weight: weight, shard=shard) for shard in [WHOLE, *ranks(of)]
    )
    for number, layer in enumerate(whole.layers):
        if isinstance(layer.feed_forward, Experts):
            own = [part.layers[number].feed_forward for part in parts]
            downs = [one.down[1].weight for one in own if isinstance(one, Experts)]
            assert torch.equal(torch.cat(downs, 1), layer.feed_forward.down[1].weight)


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
    for shard in ranks(of):
        part = memory_of(described(config, shard).layers)
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
        (
            "MixtralForCausalLM",
            {"expert_size": 18},
            4,
            "4 ranks can't have equal parts of 18 intermediate numbers of an",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"intermediate_size": 33},
            2,
            "2 ranks .* of 33 intermediate numbers of an expert",
        ),
        ("Qwen3NextForCausalLM", {"shared_size": 25}, 2, "2 ranks .* of 25 intermediate numbers of a shared expert"),
        (
            "BambaForCausalLM",
            {"mamba": Mamba2Shape(6, 8, 2, 16, 4)},
            4,
            "4 ranks .* of 2 groups of Mamba-2 heads; .* divide 2, since the norm",
        ),
        (
            "BambaForCausalLM",
            {"mamba": Mamba2Shape(6, 8, 1, 16, 4)},
            2,
            "2 ranks .* of 1 groups of Mamba-2 heads; .* divide 1, since the norm",
        ),
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
    with pytest.raises(ShardError, match=sentence):
        described(config_of(architecture, **changes), Shard(0, of))


@pytest.mark.parametrize("name", ["mixtral_window", "glm4_moe_bfloat16_two_shared", "granite_hybrid", "qwen3_5_moe"])
def test_a_rank_reads_its_slices_of_experts_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite and Qwen3.5 have the experts of a layer in one tensor."""
    save(next(case for case in CASES if case.name == name), tmp_path)
    checkpoint, read, reading = open_checkpoint(tmp_path), dict[str, int](), weights_module.read_safetensors
    done = list[tuple[int, int]]()

    def read_safetensors(
        stored: SafetensorsTensor, rows: range | None = None, inputs: range | None = None
    ) -> torch.Tensor:
        tensor = reading(stored, rows, inputs)
        read[stored.name] = read.get(stored.name, 0) + tensor.numel()
        return tensor

    def load(shard: Shard) -> None:
        load_weights(
            checkpoint, load_config(checkpoint), torch.float32, CPU, lambda weight: weight,
            lambda *at: done.append(at), shard,
        )  # fmt: skip
        assert done[-1][0] == done[-1][1], "progress comes to its end"

    monkeypatch.setattr(weights_module, "read_safetensors", read_safetensors)
    load(WHOLE)
    whole = dict(read)
    read.clear()
    load(Shard(1, 2))
    of_experts = {name for name in whole if OF_EXPERTS.search(name)}
    assert of_experts
    assert all(2 * read[name] == whole[name] for name in of_experts)
