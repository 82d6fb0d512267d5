"""A checkpoint whose vocabulary has more ids than its tokenizer: none of these is sampled, whatever samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.local_service import local_service
from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.checkpoint.check_process import size_of_tokenizer
from runahead.v1 import (
    GenerateOnceRequest,
    GenerationServiceStub,
    OutputOptions,
    SamplingOptions,
    StoppingOptions,
    Structure,
    TokenIds,
)
from tests.service.rpc_errors import failure, words

TIMEOUT_S = 60.0
IDS, PADDING = 4096, 70
PROMPT = TokenIds(ids=[262, 500, 1000, 2000])
FLAGS = ["--max-rows", "4", "--num-blocks", "64", "--threads", "1", "--no-request-log"]


def write_padded_model(folder: Path) -> Path:
    """The bundled model with PADDING ids more, which it says sooner than all others."""
    folder.mkdir()
    config = json.loads((BUNDLED_FOLDER / "config.json").read_text(encoding="utf-8"))
    config |= {"vocab_size": IDS + PADDING, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes((BUNDLED_FOLDER / "tokenizer.json").read_bytes())
    tensors = load_file(BUNDLED_FOLDER / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding[:PADDING]])
    tensors["lm_head.weight"] = torch.cat([embedding, 40 * embedding[200 : 200 + PADDING]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_padded_model(tmp_path_factory.mktemp("checkpoint") / "padded")


def stub_of(*flags: str) -> Iterator[GenerationServiceStub]:
    with local_service([*flags, *FLAGS]) as service, grpc.insecure_channel(service.url) as channel:
        yield GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def bundled() -> Iterator[GenerationServiceStub]:
    yield from stub_of()


@pytest.fixture(scope="module", params=["none", "ngram"])
def padded(folder: Path, request: pytest.FixtureRequest) -> Iterator[GenerationServiceStub]:
    yield from stub_of("--model", str(folder), "--drafter", request.param)


def request_of(sampling: SamplingOptions, **more: object) -> GenerateOnceRequest:
    return GenerateOnceRequest(
        token_ids=PROMPT,
        sampling=sampling,
        stopping=StoppingOptions(max_tokens=40),
        output=OutputOptions(logprobs=3, prompt_logprobs=1),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(temperature=0.0),
        SamplingOptions(temperature=1.0, seed=3),
        SamplingOptions(temperature=1.2, seed=4, top_k=50, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
        SamplingOptions(temperature=1.0, seed=5, logit_bias={IDS + 1: 5.0, 300: 1.0}),
        SamplingOptions(temperature=1.0, seed=6, allowed_token_ids=[*range(200, 900), IDS + 3]),
    ],
    ids=["greedy", "drawn", "filtered and penalised", "biased", "of allowed ids"],
)
def test_completions_are_those_of_the_model_without_padding(
    bundled: GenerationServiceStub, padded: GenerationServiceStub, sampling: SamplingOptions
) -> None:
    plain = SamplingOptions()
    plain.CopyFrom(sampling)
    plain.logit_bias.pop(IDS + 1, None)
    if plain.allowed_token_ids:
        del plain.allowed_token_ids[-1]
    expected = bundled.GenerateOnce(request_of(plain), timeout=TIMEOUT_S)
    found = padded.GenerateOnce(request_of(sampling), timeout=TIMEOUT_S)
    assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
    for tokens, others in ((found.tokens, expected.tokens), (found.prompt.tokens[1:], expected.prompt.tokens[1:])):
        assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in others], abs=1e-4)
        assert [[top.id for top in token.top] for token in tokens] == [
            [top.id for top in token.top] for token in others
        ]


def test_a_structure_is_followed(padded: GenerationServiceStub) -> None:
    asked = request_of(SamplingOptions(temperature=1.0, seed=2), structure=Structure(regex="[a-z]{5,10}"))
    assert padded.GenerateOnce(asked, timeout=TIMEOUT_S).text.isalpha()


def test_allowed_ids_that_are_all_padding_are_refused(padded: GenerationServiceStub) -> None:
    asked = request_of(SamplingOptions(allowed_token_ids=[IDS, IDS + 5]))
    sentence = words(failure(lambda: padded.GenerateOnce(asked, timeout=TIMEOUT_S)))
    assert f"has no id below {IDS}" in sentence


def test_without_a_tokenizer_every_id_of_the_vocabulary_is_sampled(folder: Path) -> None:
    for stub in stub_of("--model", str(folder), "--tokenizer", "none"):
        found = stub.GenerateOnce(request_of(SamplingOptions(temperature=0.0)), timeout=TIMEOUT_S)
        assert any(token.id >= IDS for token in found.tokens)


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ({"model": {"vocab": {"a": 4, "b": 1}}, "added_tokens": [{"id": 9}, {"id": 5}]}, 10),
        ({"model": {"vocab": {"a": 4, "b": 1}}}, 5),
        ({"model": {"vocab": [["a", 0.5], ["b", 0], ["c", -1]]}, "added_tokens": [{"id": 1}]}, 3),
        ({"model": {"vocab": {}}, "added_tokens": []}, 0),
        ({"model": {"vocab": 5}}, 0),
        ([], 0),
    ],
)
def test_a_tokenizers_highest_id_is_found_in_every_form(tokenizer: object, size: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert size_of_tokenizer(open_checkpoint(tmp_path)) == 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert size_of_tokenizer(open_checkpoint(tmp_path)) == size
