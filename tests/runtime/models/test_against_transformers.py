"""Our logits and greedy tokens against transformers', through the paged, chunked, batched path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.cpu_check.self_test import MASKED, Trial
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from tests.runtime.models.checkpoints import CASES, Case, save

pytestmark = pytest.mark.usefixtures("without_gradients")

TOLERANCE = 2e-4
CHUNKS = (13, 1, 32, 5)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Case, Decoder, PreTrainedModel]:
    case: Case = request.param
    with torch.inference_mode(False):
        oracle = save(case, tmp_path)
        ours = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    return case, ours, oracle


def _prompts(decoder: Decoder, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(decoder.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def test_logits_of_chunks_among_decode_rows_are_those_of_transformers(
    pair: tuple[Case, Decoder, PreTrainedModel],
) -> None:
    case, ours, oracle = pair
    assert (len(list(Path(oracle.config._name_or_path).glob("*.safetensors"))) > 1) == (case.shard_size != "1GB")
    prompts = _prompts(ours, (90, 7, 41, 64, 1))
    trial = Trial(ours, prompts, 96, 16, seed=1)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    step = 0
    while unfinished := [i for i, prompt in enumerate(prompts) if trial.computed[i] < len(prompt)]:
        work = [(i, min(CHUNKS[(i + step) % 4], len(prompts[i]) - trial.computed[i])) for i in unfinished]
        work.insert(step % (len(work) + 1), (MASKED, 1))
        for (sequence, _), part in zip(work, trial.advance(work), strict=True):
            if sequence != MASKED:
                logits[sequence].append(part)
        step += 1
    for prompt, parts in zip(prompts, logits, strict=True):
        expected = oracle(torch.tensor([prompt])).logits[0]
        assert (torch.cat(parts) - expected).abs().max().item() <= TOLERANCE


def test_64_greedy_tokens_with_neighbours_are_those_of_transformers(
    pair: tuple[Case, Decoder, PreTrainedModel],
) -> None:
    _, ours, oracle = pair
    prompts = _prompts(ours, (30, 3, 17))
    trial = Trial(ours, prompts, 100, 16, seed=2)
    new = 64
    for sequence, prompt in enumerate(prompts):  # each prompt is prefilled beside those already decoding
        work = [(sequence, len(prompt)), *((other, 1) for other in range(sequence))]
        _append_greedy(trial, work)
    while any(len(known) < len(prompt) + new for known, prompt in zip(trial.tokens, prompts, strict=True)):
        _append_greedy(trial, [(i, 1) for i in (2, 0, 1)])
    generated: set[int] = set()
    for prompt, known in zip(prompts, trial.tokens, strict=True):
        # Token n + 1 is the oracle's choice after the n before it, for every n: the same as generating with the oracle.
        known = known[: len(prompt) + new]
        choices = oracle(torch.tensor([known])).logits[0].argmax(dim=-1)
        assert known[len(prompt) :] == choices[len(prompt) - 1 : -1].tolist()
        generated |= set(known[len(prompt) :])
    assert len(generated) > 8, "the model repeats itself: the comparison would show little"


def _append_greedy(trial: Trial, work: list[tuple[int, int]]) -> None:
    for (sequence, _), logits in zip(work, trial.advance(work), strict=True):
        trial.tokens[sequence].append(int(logits[-1].argmax()))
