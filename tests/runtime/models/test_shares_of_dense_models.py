"""What tensor-parallel ranks read of dense models: heads, widths and tokens, each by one rank, in slices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gguf import GGMLQuantizationType

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint, open_head
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.kernels.layers import Attention, Dense, Layer
from runahead.runtime.kernels.ranks import WHOLE, Shard
from runahead.runtime.models import weights as weights_module
from runahead.runtime.models.architecture import EMBEDDING, LM_HEAD, ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.memory import memory_of, weight_bytes
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import described, dummy_weights, load_weights, why_not_divided
from runahead.runtime.process.drafting_files import drafting_bytes
from runahead.runtime.wire.engine_config import EngineConfig
from tests.gpu.gpu_chain import small_config
from tests.runtime.checkpoint.gguf_files import llama, write
from tests.runtime.kernels.test_expert_shares import ranks
from tests.runtime.models import eagle3_heads, eagle_heads
from tests.runtime.models.checkpoints import CASES, Case, save

CPU = torch.device("cpu")
NAMES = ("llama_tied_biased", "phi3", "qwen3_biased_grouped", "gemma3", "smollm3", "granite_biased")


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def load(folder: Path, shard: Shard, config: ModelConfig | None = None, shared: Collection[str] = ()) -> ModelWeights:
    checkpoint = open_checkpoint(folder)
    config = config or load_config(checkpoint)
    return load_weights(checkpoint, config, torch.float32, CPU, lambda weight: weight, shard=shard, shared=shared)


def parts_of(layer: Layer) -> tuple[Attention, Dense]:
    assert isinstance(layer.mixer, Attention)
    assert isinstance(layer.feed_forward, Dense)
    return layer.mixer, layer.feed_forward


def heads_of(attention: Attention) -> list[list[torch.Tensor]]:
    """Of queries, keys and values, the weights of each head."""
    shape = attention.shape
    sizes = (shape.q_size, shape.kv_size, shape.kv_size)
    return [list(part.split(shape.head_dim)) for part in attention.qkv.weight.split(sizes)]


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_the_whole_model_s_numbers_between_them(name: str, of: int, tmp_path: Path) -> None:
    """Heads of queries, widths and tokens side by side are the whole's; a rank has the KV head that its heads read."""
    save(case_of(name), tmp_path)
    check_parts(load(tmp_path, WHOLE), [load(tmp_path, shard) for shard in ranks(of)])


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("llama", eagle_heads, {EMBEDDING, LM_HEAD}),
        ("llama", eagle3_heads, {EMBEDDING}),
        ("llama_tied_biased", eagle_heads, {EMBEDDING}),
    ],
)
def test_the_first_rank_has_all_that_a_draft_head_reads_of_the_model_once(
    name: str, head: ModuleType, expected: set[str], tmp_path: Path
) -> None:
    save(case_of(name), tmp_path)
    write = getattr(head, "write_head3", eagle_heads.write_head)
    write(tmp_path / "head", head.random_head())
    config = load_config(open_checkpoint(tmp_path))
    files = open_eagle(open_head(tmp_path / "head"), config, 64, "draft_model", "context_length")
    assert files.shared(config) == expected
    whole, plain = load(tmp_path, WHOLE), load(tmp_path, Shard(0, 2))
    part = load(tmp_path, Shard(0, 2), shared=files.shared(config))
    assert torch.equal(part.whole_embedding, whole.embedding)
    assert torch.equal(part.embedding, plain.embedding) and torch.equal(part.lm_head, plain.lm_head)
    assert torch.equal(part.whole_lm_head, plain.lm_head if head is eagle3_heads else whole.lm_head)
    two, one = (
        drafting_bytes(EngineConfig(model="m", tensor_parallel=of), config, torch.float32, files) for of in (2, 1)
    )
    assert weight_bytes(part) - weight_bytes(plain) == two - one > 0, "the rows are a part of what is whole"
    assert one == 4 * files.parameters


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q4_0])
def test_ranks_have_the_numbers_of_a_gguf_file_between_them(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama(), {"attn_q": kind, "ffn_down": kind, "token_embd": kind})
    check_parts(load(path, WHOLE), [load(path, shard) for shard in ranks(2)])


def check_parts(whole: ModelWeights, parts: list[ModelWeights]) -> None:
    of = len(parts)
    assert torch.equal(torch.cat([part.embedding for part in parts]), whole.embedding)
    assert torch.equal(torch.cat([part.lm_head for part in parts]), whole.lm_head)
    for number, layer in enumerate(whole.layers):
        attention, dense = parts_of(layer)
        by_rank = [parts_of(part.layers[number]) for part in parts]
        q, k, v = heads_of(attention)
        each = len(k) / attention.shape.heads
        found = [heads_of(mixer) for mixer, _ in by_rank]
        assert torch.equal(torch.cat([head for heads in found for head in heads[0]]), torch.cat(q))
        for rank, (mixer, _) in enumerate(by_rank):
            for head in range(mixer.shape.heads):
                own = head // (mixer.shape.heads // mixer.shape.kv_heads)
                read = int((rank * mixer.shape.heads + head) * each)
                assert torch.equal(found[rank][1][own], k[read])
                assert torch.equal(found[rank][2][own], v[read])
        assert torch.equal(torch.cat([mixer.o.weight for mixer, _ in by_rank], 1), attention.o.weight)
        assert torch.equal(torch.cat([part.down.weight for _, part in by_rank], 1), dense.down.weight)
        for half in (0, 1):
            halves = [part.gate_up.weight.chunk(2)[half] for _, part in by_rank]
            assert torch.equal(torch.cat(halves), dense.gate_up.weight.chunk(2)[half])
        assert [mixer.o.bias is not None for mixer, _ in by_rank] == [
            attention.o.bias is not None and rank == 0 for rank in range(of)
        ], "a bias is added once"


def test_a_rank_reads_its_slices_of_the_files_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(case_of("phi3"), tmp_path)
    read, reading = dict[str, int](), weights_module.read_safetensors

    def read_safetensors(
        stored: SafetensorsTensor, rows: range | None = None, inputs: range | None = None
    ) -> torch.Tensor:
        tensor = reading(stored, rows, inputs)
        read[stored.name] = read.get(stored.name, 0) + tensor.numel()
        return tensor

    monkeypatch.setattr(weights_module, "read_safetensors", read_safetensors)
    load(tmp_path, WHOLE)
    whole = dict(read)
    read.clear()
    for shard in ranks(2):
        load(tmp_path, shard)
    norms = {name for name in whole if "norm" in name}
    repeated = {name for name in whole if "qkv_proj" in name}  # one KV head, which both ranks read
    assert norms and repeated
    assert {name for name in whole if read[name] == 2 * whole[name]} == norms
    assert all(whole[name] < read[name] < 2 * whole[name] for name in repeated)
    assert all(read[name] == whole[name] for name in whole if name not in norms | repeated)


@pytest.mark.parametrize("of", [2, 4])
def test_random_weights_are_the_same_numbers_for_any_number_of_ranks(of: int) -> None:
    config = small_config()
    whole = dummy_weights(config, torch.float32, CPU, lambda weight: weight)
    parts = [dummy_weights(config, torch.float32, CPU, lambda weight: weight, shard=shard) for shard in ranks(of)]
    assert torch.equal(torch.cat([part.embedding for part in parts]), whole.embedding)
    downs = [parts_of(part.layers[1])[1].down.weight for part in parts]
    assert torch.equal(torch.cat(downs, 1), parts_of(whole.layers[1])[1].down.weight)


def layer_norm(part: Attention | Dense) -> torch.Tensor:
    assert part.norm is not None
    return part.norm.weight


def test_ranks_of_random_weights_have_the_same_norms_beside_biases(tmp_path: Path) -> None:
    save(case_of("llama_tied_biased"), tmp_path)
    config = load_config(open_checkpoint(tmp_path))
    parts = [dummy_weights(config, torch.float32, CPU, lambda weight: weight, shard=shard) for shard in ranks(2)]
    norms = [[layer_norm(each) for layer in part.layers for each in parts_of(layer)] for part in parts]
    assert all(torch.equal(own, other) for own, other in zip(*norms, strict=True))


def test_a_tied_head_that_differs_is_found_by_the_rank_that_has_its_tokens(tmp_path: Path) -> None:
    """The copy of the head is stored though the model is tied."""
    save(case_of("llama"), tmp_path)
    config = replace(load_config(open_checkpoint(tmp_path)), tie_word_embeddings=True)
    for shard in ranks(2):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight that differs"):
            load(tmp_path, shard, config)


def test_a_rank_keeps_keys_and_values_of_its_kv_heads_alone() -> None:
    config = small_config(num_heads=8, num_kv_heads=2)
    whole = memory_of(described(config).layers).bytes_kept(16, torch.float32).block
    kept = [memory_of(described(config, Shard(0, of)).layers).bytes_kept(16, torch.float32).block for of in (2, 4, 8)]
    assert kept == [whole // 2, whole // 2, whole // 2], "fewer KV heads than ranks are repeated"


@pytest.mark.parametrize(
    ("changes", "of", "sentence"),
    [
        ({"vocab_size": 161}, 2, "2 ranks can't have equal parts of 161 tokens of the vocabulary"),
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "4 ranks can't have equal parts of 6 query heads"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "4 ranks can't have equal parts of 6 KV heads"),
        ({"num_heads": 24, "num_kv_heads": 3}, 8, "8 ranks can't repeat 3 KV heads equally"),
        ({"intermediate_size": 98}, 4, "4 ranks can't have equal parts of 98 intermediate numbers"),
        (
            {"architecture": "Olmo2ForCausalLM", "attention_bias": False},
            2,
            "2 ranks can't have parts of Olmo2ForCausalLM: its norms of queries and keys are taken over all heads",
        ),
    ],
)
def test_what_can_t_be_divided_is_said_by_a_sentence(changes: dict[str, object], of: int, sentence: str) -> None:
    assert why_not_divided(small_config(**changes), of).startswith(sentence)
    assert why_not_divided(small_config(), of if of < 8 else 4) == ""
