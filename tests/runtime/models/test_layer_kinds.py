"""What an engine says of its model's layers, from what `config.json` says of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import pytest

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.layer_products import layers_to_warm_up, products_of
from runahead.runtime.models.layer_kinds import layer_kinds
from runahead.runtime.models.read_config import load_config, parse_config
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.models.weights import described
from runahead.runtime.process.assemble import drafters_of
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.messages import ExpertCounts, LayerKind
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.public_configs import PUBLIC


def kinds_of(name: str) -> tuple[LayerKind, ...]:
    return layer_kinds(described(parse_config(PUBLIC[name], ())).layers)


def test_layers_that_are_alike_are_one_kind() -> None:
    assert kinds_of("Qwen3 0.6B") == (LayerKind(28, "attention", 0, "dense"),)


def test_experts_are_counted_and_those_of_a_token() -> None:
    assert kinds_of("Mixtral 8x7B") == (LayerKind(32, "attention", 0, "experts", ExpertCounts(8, 2)),)


def test_an_expert_that_every_token_gets_is_counted_by_itself() -> None:
    kinds = kinds_of("Granite 4.0 H Tiny")
    assert [(kind.mixer, kind.count) for kind in kinds] == [("mamba2", 36), ("attention", 4)]
    assert {kind.experts for kind in kinds} == {ExpertCounts(64, 6, 1)}
    kinds = kinds_of("Qwen3-Next 80B-A3B")
    assert [(kind.mixer, kind.count) for kind in kinds] == [("gated_delta", 36), ("attention", 12)]
    assert {kind.experts for kind in kinds} == {ExpertCounts(512, 10, 1)}


def test_a_layer_that_is_half_of_one_says_which_half() -> None:
    kinds = kinds_of("Nemotron-H 8B")
    assert kinds == (LayerKind(24, "mamba2", 0, ""), LayerKind(24, "", 0, "ungated"), LayerKind(4, "attention", 0, ""))


def test_experts_of_half_a_layer_and_those_behind_dense_layers_are_counted() -> None:
    experts = ExpertCounts(128, 6, 1)
    kinds = kinds_of("Nemotron 3 Nano 30B-A3B")
    assert kinds == (
        LayerKind(23, "mamba2", 0, ""),
        LayerKind(23, "", 0, "experts", experts),
        LayerKind(6, "attention", 0, ""),
    )
    dense, sparse = kinds_of("GLM-4.5")
    assert dense == LayerKind(3, "attention", 0, "dense")
    assert sparse == LayerKind(89, "attention", 0, "experts", ExpertCounts(160, 8, 1))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_layers_that_a_start_meets_have_every_size_of_a_product(name: str) -> None:
    layers = described(parse_config(PUBLIC[name], ())).layers
    met = layers_to_warm_up(layers)
    sizes = [
        {linear.weight.shape for layer in some for linear in products_of(layer)} for some in (layers, layers[:met])
    ]
    assert sizes[0] == sizes[1]
    kinds = [{(kind.mixer, kind.feed_forward) for kind in layer_kinds(some)} for some in (layers, layers[:met])]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("name", "met"), [("Qwen3 0.6B", 1), ("Mixtral 8x7B", 1), ("GLM-4.5", 4), ("Qwen3-Next 80B-A3B", 4)]
)
def test_a_start_meets_no_more_layers_than_it_takes_for_one_of_each_kind(name: str, met: int) -> None:
    assert layers_to_warm_up(described(parse_config(PUBLIC[name], ())).layers) == met


def test_windows_and_kinds_of_feed_forward_are_told_apart_in_the_order_of_layers() -> None:
    raw = {**PUBLIC["Qwen3 30B-A3B"], "num_hidden_layers": 5, "mlp_only_layers": [0, 3]}
    found = layer_kinds(described(parse_config(raw, ())).layers)
    assert [(kind.count, kind.feed_forward) for kind in found] == [(2, "dense"), (3, "experts")]
    raw = {**PUBLIC["Qwen3 0.6B"], "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 20}
    raw.pop("layer_types", None)
    found = layer_kinds(described(parse_config(raw, ())).layers)
    assert [(kind.count, kind.window) for kind in found] == [(20, 0), (8, 100)]


def words_of(kinds: tuple[LayerKind, ...]) -> set[str]:
    words = {"window" if kind.window else kind.mixer for kind in kinds} | {kind.feed_forward for kind in kinds}
    return words - {""}


def test_an_architecture_says_what_its_layers_may_be(tmp_path: Path) -> None:
    """Nothing that a known model has is missing, and nothing that these and the tests' cases lack is there."""
    seen: dict[str, set[str]] = {name: set() for name in ARCHITECTURES}
    said = {name: set(found.layers) for name, found in ARCHITECTURES.items()}
    for raw in PUBLIC.values():
        config = parse_config(raw, ())
        seen[config.architecture] |= words_of(layer_kinds(described(config).layers))
    types = {found.model_type for name, found in ARCHITECTURES.items() if seen[name] != said[name]}
    for case in (case for case in CASES if case.config.model_type in types):
        save(case, tmp_path / case.name)
        config = load_config(open_checkpoint(tmp_path / case.name))
        seen[config.architecture] |= words_of(layer_kinds(described(config).layers))
    assert seen == said


@pytest.mark.parametrize(
    ("name", "drafters"),
    [
        ("Qwen3 0.6B", ("ngram", "eagle", "model")),
        ("MiMo 7B", ("ngram", "eagle", "mtp", "model")),
        ("Bamba 9B", ("ngram",)),
        ("Qwen3.5 27B", ("ngram", "mtp")),
    ],
)
def test_drafters_are_named_where_a_start_may_ask_for_them(
    name: str, drafters: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]), encoding="utf-8")
    checkpoint = open_checkpoint(tmp_path)
    config, drawn = load_config(checkpoint), EngineConfig(model="m", load_format="dummy")
    assert drafters_of(drawn, config, checkpoint) == drafters
    assert drafters_of(msgspec.structs.replace(drawn, device="cuda"), config, checkpoint) == drafters, "on a GPU, too"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    without_head = tuple(name for name in drafters if name != "mtp")
    assert drafters_of(EngineConfig(model="m"), config, checkpoint) == without_head
