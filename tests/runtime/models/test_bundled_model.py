"""The bundled model: what its folder promises, and that it says what transformers says with the same weights."""

from __future__ import annotations

import hashlib
import json
import lzma
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import runahead.runtime.models
from benchmarks.bundled_model.compression import Scorer
from benchmarks.bundled_model.corpus import read_file
from runahead.runtime.checkpoint import BUNDLED_HEAD, open_checkpoint, open_head
from runahead.runtime.kernels.layers import Attention, Experts, Mamba2
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.load import load_model
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import described

FOLDER = Path(runahead.runtime.models.__path__[0]) / "bundled"
HYBRID = FOLDER / "hybrid"
TOLERANCE = 2e-4
PROGRAM = '''class Stack:
    """A last-in, first-out store."""

    def __init__(self, items=()):
        self._items = list(items)

    def pop(self):
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()
'''


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_folder_is_at_most_12_megabytes_with_its_tokenizer() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir() if file.is_file()) <= 12_000_000


def test_its_draft_head_is_at_most_3_megabytes_in_bfloat16_and_fits_it() -> None:
    assert sum(file.stat().st_size for file in BUNDLED_HEAD.iterdir()) <= 3_000_000
    with safe_open(BUNDLED_HEAD / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16, torch.int64}, "the integers are tokens"
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    target = load_model(open_checkpoint(FOLDER), torch.device("cpu"), torch.float32, "dummy", ReferenceKernels()).config
    open_eagle(open_head(BUNDLED_HEAD), target, target.max_position_embeddings, "--draft-model", "--context-length")


def test_the_hybrid_is_at_most_6_megabytes_in_bfloat16_with_its_tokenizer_and_has_states_and_experts() -> None:
    assert sum(file.stat().st_size for file in HYBRID.iterdir()) <= 6_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (HYBRID / name).read_bytes() == (FOLDER / name).read_bytes()
    with safe_open(HYBRID / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    served = described(load_config(open_checkpoint(HYBRID)))
    kinds = Counter((type(layer.mixer), type(layer.feed_forward)) for layer in served.layers)
    assert kinds == {(Mamba2, Experts): 4, (Attention, Experts): 2}
    config = json.loads((HYBRID / "config.json").read_text())
    assert 1 < config["num_experts_per_tok"] < config["num_local_experts"]


def test_the_card_names_the_weights_that_are_there() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for weights in (FOLDER / "model.safetensors", BUNDLED_HEAD / "model.safetensors", HYBRID / "model.safetensors"):
        assert hashlib.sha256(weights.read_bytes()).hexdigest() in card


def test_the_configuration_is_the_promised_one() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["vocab_size"], config["max_position_embeddings"], config["head_dim"]) == (4096, 2048, 64)
    assert config["tie_word_embeddings"] is True
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]


def test_the_weights_are_five_million_numbers_in_bfloat16() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert 4_500_000 <= sum(tensor.numel() for tensor in tensors) <= 5_500_000


def test_the_licence_of_the_corpus_lies_beside_the_weights() -> None:
    licence = (FOLDER / "LICENSE").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "LICENSE" in (FOLDER / "README.md").read_text()


def test_the_vocabulary_has_4096_entries_and_the_end_token_is_the_models(tokenizer: Tokenizer) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.token_to_id("<|endoftext|>") == config["eos_token_id"]


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["\x00\r\n\t\x0b \x85", "naïve 日本語 🎉👩‍👩‍👧", "a\n\n\n    b  # c\t\n", "\u202e\ufeff𝒳"]
)
def test_awkward_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("width", [4, 8, 12, 16, 20])
def test_an_indentation_is_one_token(tokenizer: Tokenizer, width: int) -> None:
    assert len(tokenizer.encode(" " * width).ids) == 1


def test_a_prompt_may_end_after_any_newline_or_indentation(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(PROGRAM).ids
    for line_end in (i for i, character in enumerate(PROGRAM) if character == "\n" and PROGRAM[i + 1 : i + 2] != "\n"):
        rest = PROGRAM[line_end + 1 :]
        for cut in {line_end + 1, line_end + 1 + len(rest) - len(rest.lstrip(" "))}:
            assert tokenizer.encode(PROGRAM[:cut]).ids + tokenizer.encode(PROGRAM[cut:]).ids == whole


@pytest.mark.parametrize("folder", [FOLDER, HYBRID], ids=["dense", "hybrid"])
def test_the_logits_are_those_of_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    ids = tokenizer.encode(PROGRAM).ids
    ours = load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        trial = Trial(ours, [ids], len(ids), 16, seed=0)
        logits = torch.cat([trial.advance([(0, 50)])[0], trial.advance([(0, len(ids) - 50)])[0]])
        expected = oracle(torch.tensor([ids])).logits[0]
    assert (logits - expected).abs().max().item() <= TOLERANCE


def test_transformers_cuts_text_as_the_tokenizer_file_does(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    assert theirs(PROGRAM)["input_ids"] == tokenizer.encode(PROGRAM).ids
    assert theirs.eos_token_id == tokenizer.token_to_id("<|endoftext|>")


@pytest.mark.parametrize(("folder", "times"), [(FOLDER, 1.5), (HYBRID, 1.3)], ids=["dense", "hybrid"])
def test_a_held_out_file_costs_less_than_xz_needs_for_it(folder: Path, times: float) -> None:
    path = Path(sysconfig.get_path("stdlib")) / "dbm/__init__.py"
    file = read_file("dbm/__init__.py", path.read_text(encoding="utf-8"), path.read_bytes())
    assert file is not None
    text = "".join(file.definitions).encode()
    assert Scorer(folder).bits(file.definitions) < 8 * len(lzma.compress(text, preset=9)) / times
