"""Every architecture through the whole chain, at the deepest, in `make kernels` at every depth and longer: greedy
tokens of each neighbour are the oracle's. With random weights each takes no more than a `config.json`."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from runahead.runtime.engine.loop import Engine
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.assembled import assembled
from tests.runtime.chain import MemoryLinks
from tests.runtime.models.checkpoints import CASES, Case, save
from tests.runtime.models.test_model_config import RAW

DEPTHS = (0, 1, 2, 4)
LENGTHS = (1, 7, 40, 65, 16)  # of the prompts: shorter than a chunk, several chunks, ending with one and just after
TOKENS = 24  # the longest prompt gets into its twelfth block of 8
MANY = 64  # in `make kernels`
NEAR_TIE = 2e-4  # two logits closer than the two sides agree to
# Keys that a `config.json` must have, and of experts fewer than the default, which is up to 512.
KEYS: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*-"},
    "Qwen3MoeForCausalLM": {"num_experts": 16},
    "Qwen3NextForCausalLM": {"num_experts": 16},
    "Qwen3_5MoeForCausalLM": {"num_experts": 16},
    "Glm4MoeForCausalLM": {"n_routed_experts": 16},
}


def prompts(vocab: int) -> list[list[int]]:
    return [[(37 * i + 11 * j) % vocab for j in range(length)] for i, length in enumerate(LENGTHS)]


def completions(
    folder: Path, depth: int, vocab: int, drawn: bool = False, count: int = TOKENS, **settings: Any
) -> dict[int, list[int]]:
    """What the engine generates, in the CPU device's test mode: delays, and poison in what is given back."""
    config = EngineConfig(
        model=str(folder), load_format="dummy" if drawn else "auto", run_ahead=depth, max_rows=4, block_size=8,
        prefill_chunk=16, max_prefill_tokens=32, num_blocks=100, device="cpu", threads=1, jitter_seed=depth,
        **settings,
    )  # fmt: skip
    parts = assembled(config)
    links = MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=10, poison=parts.poison)
    stopping = StoppingParams(count, ignore_eos=True)
    for handle, prompt in enumerate(prompts(vocab)):
        tokens = np.asarray(prompt, np.int32).tobytes()
        links.tell(1, m.Submit(handle, f"r{handle}", tokens, SamplingParams(temperature=0.0), stopping))
    engine.turn()
    while len(engine.registry):
        engine.turn()
    engine.drain("test")
    parts.device.close()
    found: dict[int, list[int]] = defaultdict(list)
    for _, output in links.sent:
        if isinstance(output, m.Output):
            handles, ids = np.frombuffer(output.handles, np.int64), np.frombuffer(output.tokens, np.int32)
            for handle, token in zip(handles.tolist(), ids.tolist(), strict=True):
                found[handle].append(token)
    return found


@torch.inference_mode()
def assert_greedy(oracle: PreTrainedModel, prompt: list[int], completion: list[int]) -> None:
    """Each token is the oracle's choice after the tokens before it."""
    logits = oracle(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(completion)[:, None])[:, 0]
    assert torch.all(chosen >= logits.max(dim=1).values - NEAR_TIE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_greedy_tokens_with_neighbours(case: Case, large: bool, tmp_path: Path) -> None:
    oracle = save(case, tmp_path)
    vocab, count = oracle.config.vocab_size, MANY if large else TOKENS
    deepest = completions(tmp_path, DEPTHS[-1], vocab, count=count)
    for handle, prompt in enumerate(prompts(vocab)):
        assert len(deepest[handle]) == count
        assert_greedy(oracle, prompt, deepest[handle])
    for depth in DEPTHS[:-1] if large else ():
        assert completions(tmp_path, depth, vocab, count=count) == deepest, f"depth {depth}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_weights_need_no_more_than_a_config(tmp_path: Path, architecture: str) -> None:
    raw = {**RAW, "architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    raw.update(KEYS.get(architecture, {}))
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    vocab = int(raw["vocab_size"])
    found = completions(tmp_path, DEPTHS[-1], vocab, drawn=True, count=8)
    assert sorted(found) == list(range(len(LENGTHS)))
    for tokens in found.values():
        assert len(tokens) == 8 and max(tokens) < vocab
