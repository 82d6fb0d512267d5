"""The hybrid that is trained beside the bundled model: what is trained is what is served, and a run goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import runahead.runtime.models
from benchmarks.bundled_model import train as training
from benchmarks.bundled_model.batches import Encoded
from benchmarks.bundled_model.hybrid_network import ATTENTION, CHUNK, MAMBA, Experts, HybridNetwork, HybridShape
from benchmarks.bundled_model.muon import BatchedMuon
from benchmarks.bundled_model.network import Network
from benchmarks.bundled_model.train import Data, Machine, Recipe
from benchmarks.bundled_model.training_state import STATE, load_state, save_state
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.triton.exactness import why_impossible
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.trial import Trial
from runahead.runtime.models.weights import described

SMALL = HybridShape(
    vocabulary=96, hidden=128, kinds=(MAMBA, ATTENTION, MAMBA), heads=2, kv_heads=1, mamba_heads=4, state=16,
    experts=5, chosen=2, expert_size=24, shared_size=32,
)  # fmt: skip
BUNDLED = Path(runahead.runtime.models.__path__[0]) / "bundled"
CPU = Machine(torch.device("cpu"), bfloat16=False, compiles=False)


def network(seed: int = 0) -> HybridNetwork:
    """Of weights that bfloat16 has, and far enough apart for logits to mean something."""
    torch.manual_seed(seed)
    made = HybridNetwork(SMALL, 0.0).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
            parameter.copy_(parameter.bfloat16().float())
    return made


@torch.inference_mode()
def test_what_is_trained_is_what_is_served(tmp_path: Path) -> None:
    """Two chunks of the recurrence at once, and token by token in the service's own decoder."""
    made, ids = network(), [(7 * place) % SMALL.vocabulary for place in range(2 * CHUNK)]
    made.save(tmp_path, 0)
    served = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    logits = Trial(served, [ids], len(ids), 16, seed=0).advance([(0, len(ids))])[0]
    expected, _ = made(torch.tensor([ids]))
    assert (logits - expected[0]).abs().max() <= 2e-4
    assert expected.std() > 0.1


@torch.inference_mode()
def test_a_bundled_checkpoint_teaches_with_the_logits_that_it_is_served_with() -> None:
    ids = list(range(20, 52))
    served = load_model(open_checkpoint(BUNDLED), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    logits = Trial(served, [ids], len(ids), 16, seed=0).advance([(0, len(ids))])[0]
    taught, uneven = Network.load(BUNDLED)(torch.tensor([ids]))
    assert (logits - taught[0]).abs().max() <= 2e-4
    assert uneven == 0


def test_a_hybrid_of_the_sizes_that_are_trained_has_at_most_6_megabytes(tmp_path: Path) -> None:
    HybridNetwork(HybridShape(), 0.0).save(tmp_path, 0)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size + (BUNDLED / "tokenizer.json").stat().st_size + (BUNDLED / "LICENSE").stat().st_size <= 6_000_000
    assert json.loads((tmp_path / "config.json").read_text())["num_local_experts"] > 1
    served = described(load_config(open_checkpoint(tmp_path)))
    assert why_impossible(served.layers, torch.bfloat16) == "", "a GPU has no exact kernels for it"


@torch.inference_mode()
def test_experts_that_are_chosen_unevenly_cost_more() -> None:
    torch.manual_seed(3)
    layer, x = Experts(SMALL), torch.randn(2, 8, SMALL.hidden).abs()
    layer.router.weight.zero_()
    layer.router.weight[:2] = 1.0  # every token has the same two
    _, uneven = layer(x)
    assert uneven > 1.5
    layer.router.weight.normal_(std=0.01)
    _, uneven = layer(torch.randn(8, 64, SMALL.hidden))
    assert 0.9 < uneven < 1.2


def test_heads_that_do_not_fill_the_residual_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 heads of 64 are 192 numbers, and hidden is 128"):
        replace(SMALL, heads=3)


def data() -> Data:
    files = [[(5 * place + file) % SMALL.vocabulary for place in range(4200)] for file in range(3)]
    text = Encoded(files, [file[:600] for file in files], 10_000)
    return Data([text], Encoded(files[:1], [], 3_000), 0)


def recipe(steps: int) -> Recipe:
    return Recipe("small", SMALL, steps, 2048, 0.0, 1e-3, 1e-3, 0.0, 0.5, 0.0, balance=0.01)


def test_a_run_goes_on_where_another_process_left_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training.train(recipe(2), data(), [], CPU, tmp_path / "out", tmp_path / "state")
    assert (tmp_path / "out" / "model.safetensors").exists()
    other = HybridNetwork(SMALL, 0.0)
    optimizers = training.optimizers_of(other, recipe(4))
    at, best = load_state(tmp_path / "state", other, optimizers)
    assert (at.name, at.step) == ("small", 2) and at.seconds > 0 and best.keys() == other.state_dict().keys()
    save_state(tmp_path / "again", at, other, optimizers, best)
    again, left = (load_file(tmp_path / folder / STATE) for folder in ("again", "state"))
    assert again.keys() == left.keys() and all(torch.equal(again[name], left[name]) for name in left)
    assert any(name.startswith("optimizer/1/") for name in left)
    capsys.readouterr()
    training.train(recipe(3), data(), [], CPU, None, tmp_path / "state")
    said = capsys.readouterr().out
    assert "goes on from step 2" in said and "step      3" in said and "step      1 " not in said


def test_matrices_updated_in_batches_are_what_each_would_be_by_itself() -> None:
    """Wide, tall and square ones, for three steps, against torch's; matrices are as far apart as bfloat16 rounds."""
    torch.manual_seed(1)
    shapes = [(24, 64), (64, 24), (32, 32), (24, 64), (24, 64)]
    ours, theirs = (
        [torch.nn.Parameter(start.clone()) for start in starts]
        for starts in [[torch.randn(shape) for shape in shapes]] * 2
    )
    batched = BatchedMuon(ours, 0.05, 0.2)
    single = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad = torch.randn_like(mine)
        batched.step()
        single.step()
    for shape, mine, other in zip(shapes, ours, theirs, strict=True):
        moved = 3 * 0.05 * 0.2 * max(shape) ** 0.5 / min(shape) ** 0.5
        assert (mine - other).abs().max() <= 0.05 * moved


def test_what_is_no_matrix_is_refused_by_its_shape() -> None:
    with pytest.raises(ValueError, match=r"the shape \(3,\)"):
        BatchedMuon([torch.nn.Parameter(torch.zeros(3))], 0.1, 0.0)


def test_a_run_ends_when_its_time_is_over_and_leaves_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.train(replace(recipe(1000), until=time.monotonic()), data(), [], CPU, tmp_path, None)
    said = capsys.readouterr().out
    assert "small step      1 " in said and "step      2" not in said
    assert (tmp_path / "model.safetensors").exists()
