"""A GGUF file computes what transformers computes of the same file, and of the model that it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from runahead.runtime.checkpoint import gguf_file, open_checkpoint
from runahead.runtime.checkpoint.gguf_file import SUPPORTED, GgufTensor, open_gguf
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import BlasProducts
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from tests.runtime.checkpoint.gguf_files import llama, write

pytestmark = pytest.mark.usefixtures("without_gradients")

CPU = torch.device("cpu")
TOLERANCE = 2e-4
MIXED = {
    "token_embd": Kind.Q8_0, "output": Kind.Q8_0, "attn_q": Kind.Q4_1, "attn_k": Kind.Q4_1, "attn_v": Kind.F16,
    "attn_output": Kind.Q8_0, "ffn_gate": Kind.Q4_1, "ffn_up": Kind.F16, "ffn_down": Kind.BF16,
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Q4_1 tied grouped": (Kind.Q4_1, {}),
    "Q8_0 own head": (Kind.Q8_0, {"tie_word_embeddings": False}),
    "F16 one head for keys": (Kind.F16, {"num_key_value_heads": 1}),
    "as many heads for keys": (Kind.F32, {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "each tensor its own kind": (MIXED, {"tie_word_embeddings": False}),
    "wide heads": (Kind.Q8_0, {"head_dim": 40}),
}


def decoder(path: Path, dtype: torch.dtype | None = torch.float32) -> Decoder:
    return load_model(open_checkpoint(path), CPU, dtype, "auto", ReferenceKernels(BlasProducts()))


def logits(ours: Decoder, tokens: list[int]) -> torch.Tensor:
    return Trial(ours, [tokens], len(tokens), 16, seed=1).advance([(0, len(tokens))])[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_and_64_greedy_tokens_are_those_of_transformers_on_the_same_file(name: str, tmp_path: Path) -> None:
    kinds, changes = CASES[name]
    with torch.inference_mode(False):
        path = write(tmp_path / "tiny.gguf", llama(**changes), kinds)
        oracle = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ours = decoder(path)
    prompt = torch.randint(ours.config.vocab_size, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    assert (logits(ours, prompt) - oracle(torch.tensor([prompt])).logits[0]).abs().max() <= TOLERANCE
    trial = Trial(ours, [prompt], 110, 16, seed=2)
    trial.tokens[0].append(int(trial.advance([(0, len(prompt))])[0][-1].argmax()))
    while len(trial.tokens[0]) < len(prompt) + 64:
        trial.tokens[0].append(int(trial.advance([(0, 1)])[0][-1].argmax()))
    known = trial.tokens[0]
    choices = oracle(torch.tensor([known])).logits[0].argmax(dim=-1).tolist()
    assert known[len(prompt) :] == choices[len(prompt) - 1 : -1]
    assert len(set(known[len(prompt) :])) > 8, "the model repeats itself: the comparison would show little"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_rotary_frequencies_are_those_of_the_model_written(rope: dict[str, Any], tmp_path: Path) -> None:
    with torch.inference_mode(False):
        oracle = llama(rope_parameters=rope, head_dim=64)
        changes, more = written_rope(rope, 64)
        ours = decoder(write(tmp_path / "tiny.gguf", oracle, Kind.F32, changes, more))
    prompt = torch.randint(ours.config.vocab_size, (200,), generator=torch.Generator().manual_seed(7)).tolist()
    expected = oracle(torch.tensor([prompt])).logits[0]
    assert (logits(ours, prompt) - expected).abs().max() <= TOLERANCE
    with torch.inference_mode(False):
        plain = llama(rope_parameters={**rope, "rope_type": "default"}, head_dim=64)
    assert (plain(torch.tensor([prompt])).logits[0] - expected).abs().max() > 10 * TOLERANCE, "the scaling matters"


def written_rope(rope: dict[str, Any], head_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys, and tensors, by which a file says how rotary frequencies are scaled."""
    if rope["rope_type"] == "linear":
        return {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": rope["factor"]}, {}
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for length in 2 * np.pi / frequencies:  # of a wave, as the converter of llama.cpp goes through them
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {}, {"rope_freqs.weight": np.array(factors, np.float32)}


@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_tensor_read_in_pieces_is_the_tensor_dequantised_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns, heads = 48, 512, 4  # bytes are such that no scale is infinite
    monkeypatch.setattr(gguf_file, "_PIECE", 7 * columns)  # not a whole number of heads
    of_block, bytes_of_block = gguf.GGML_QUANT_SIZES[Kind[kind]]
    stored = np.random.default_rng(3).integers(0, 0x70, (rows, columns // of_block * bytes_of_block), np.uint8)
    stored = stored.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    expected = gguf.dequantize(stored, Kind[kind]).reshape(heads, 6, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    tensor = GgufTensor("blk.0.attn_q.weight", tmp_path, kind, (rows, columns), heads, stored)
    tensor.check((rows, columns))
    found = np.full((rows, columns), np.nan, np.float32)
    pieces = list(tensor.pieces())
    for place, numbers in pieces:
        found[place] = numbers
    assert len(pieces) == 7
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), "bit by bit"


def test_weights_are_dequantised_to_the_dtype_that_is_served_a_bounded_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_PIECE", 256)
    made: list[int] = []

    def counted(stored: NDArray[Any], kind: Kind) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = gguf.dequantize(stored, kind)
        made.append(numbers.size)
        return numbers

    monkeypatch.setattr(gguf_file, "dequantize", counted)
    with torch.inference_mode(False):
        path = write(tmp_path / "tiny.gguf", llama(), MIXED)
        rounded, exact = decoder(path, torch.bfloat16), decoder(path)
    assert max(made) == 256
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded.weights.embedding, exact.weights.embedding.bfloat16())
    assert torch.equal(exact.weights.lm_head, exact.weights.embedding), "the head is tied"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(Kind.F16, torch.float16), (Kind.F32, torch.float32), (Kind.Q4_1, torch.bfloat16), (Kind.BF16, torch.bfloat16)],
)
def test_the_checkpoints_own_dtype_is_that_of_its_matrices_or_bfloat16(
    kinds: Kind, expected: torch.dtype, tmp_path: Path
) -> None:
    with torch.inference_mode(False):
        path = write(tmp_path / "tiny.gguf", llama(), kinds)
    assert decoder(path, None).dtype is expected


def test_progress_rises_to_the_bytes_of_all_tensors_of_the_file(tmp_path: Path) -> None:
    with torch.inference_mode(False):
        path = write(tmp_path / "tiny.gguf", llama(), MIXED)
    seen: list[tuple[int, int]] = []
    checkpoint = open_gguf(path)
    load_model(checkpoint, CPU, None, "auto", ReferenceKernels(), lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and len(seen) > 20
    assert seen[-1] == (sum(tensor.size_bytes for tensor in checkpoint.tensors().values()),) * 2
