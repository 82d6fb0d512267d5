"""Every key of config.json is read, or known to change no number, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    BambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4MoeConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.blocks.experts import ExpertsConfig
from runahead.runtime.models.config.keys import NEUTRAL, ROPE_UNDERSTOOD, UNREAD
from runahead.runtime.models.registry import ARCHITECTURES
from tests.runtime.models.checkpoints import FULL, LLAMA3_ROPE, SLIDING
from tests.runtime.models.dense_configs import experts_of, experts_of_theirs, parse_dense
from tests.runtime.models.mimo import MiMoConfig
from tests.runtime.models.public_configs import OF_EVERY_CLASS, PUBLIC
from tests.runtime.models.test_model_config import RAW

LLAMA, QWEN2, QWEN3, MISTRAL = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"
MINISTRAL, GRANITE, SMOLLM3 = "MinistralForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM"
OLMO2, PHI3, GEMMA3, MIMO = "Olmo2ForCausalLM", "Phi3ForCausalLM", "Gemma3ForCausalLM", "MiMoForCausalLM"
MIXTRAL, QWEN3_MOE, BAMBA = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "BambaForCausalLM"
GRANITE_HYBRID, QWEN3_NEXT = "GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM"
NEMOTRON_H, QWEN3_5, QWEN3_5_MOE = "NemotronHForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
GEMMA2, GLM4_MOE = "Gemma2ForCausalLM", "Glm4MoeForCausalLM"
CLASSES: dict[str, type[PreTrainedConfig]] = {
    LLAMA: LlamaConfig,
    QWEN2: Qwen2Config,
    QWEN3: Qwen3Config,
    MISTRAL: MistralConfig,
    MINISTRAL: MinistralConfig,
    GRANITE: GraniteConfig,
    SMOLLM3: SmolLM3Config,
    OLMO2: Olmo2Config,
    PHI3: Phi3Config,
    GEMMA3: Gemma3TextConfig,
    MIMO: MiMoConfig,
    MIXTRAL: MixtralConfig,
    QWEN3_MOE: Qwen3MoeConfig,
    BAMBA: BambaConfig,
    GRANITE_HYBRID: GraniteMoeHybridConfig,
    QWEN3_NEXT: Qwen3NextConfig,
    NEMOTRON_H: NemotronHConfig,
    QWEN3_5: Qwen3_5TextConfig,
    QWEN3_5_MOE: Qwen3_5MoeTextConfig,
    GEMMA2: Gemma2Config,
    GLM4_MOE: Glm4MoeConfig,
}

PHI3_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def needed(architecture: str, layers: int) -> dict[str, Any]:
    """What the file of an architecture has to say beside what every one says."""
    if architecture == NEMOTRON_H:
        return {"layers_block_type": ["linear_attention", "mlp", FULL][:layers] * (layers // 3)}
    return {"head_dim": 16} if architecture == GLM4_MOE else {}  # by the class's own sizes an odd part would be rotated


def parse(architecture: str = LLAMA, **changes: Any) -> DenseConfig:
    own = needed(architecture, RAW["num_hidden_layers"])
    return parse_dense({**RAW, **own, "architectures": [architecture], **changes})


def test_every_architecture_is_compared_with_transformers() -> None:
    assert CLASSES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_checkpoint_is_accepted_and_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    raw = PUBLIC[name]
    config = parse_dense(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert config.windows == windows_of(theirs)
    rope = rope_of(theirs)
    stretched = theirs.max_position_embeddings / rope.get("original_max_position_embeddings", 1)
    assert config.rope_theta == rope["rope_theta"]
    assert config.rope_scaling.kind == rope["rope_type"]
    assert config.rope_scaling.factor == rope.get("factor", stretched if rope["rope_type"] == "longrope" else 1.0)
    assert config.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert config.head_dim == head_dim
    assert experts_of(config) == experts_of_theirs(theirs)
    if isinstance(config, ExpertsConfig) and config.experts:
        assert all(config.sparse)


@pytest.mark.parametrize("architecture", CLASSES)
def test_whatever_transformers_writes_for_an_architecture_is_accepted(architecture: str) -> None:
    config = CLASSES[architecture](architectures=[architecture], dtype="bfloat16", **needed(architecture, 3))
    for written in (config.to_dict(), config.to_diff_dict(), {**OF_EVERY_CLASS, **config.to_dict()}):
        assert parse_dense(written).windows == windows_of(config)


def test_every_default_of_generate_is_known_to_change_no_number() -> None:
    listed = frozenset[str]().union(*(group.keys for group in UNREAD))
    assert GenerationConfig._get_default_generation_params().keys() <= listed


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_key_that_is_left_out_counts_as_transformers_counts_it(architecture: str) -> None:
    given: dict[str, Any] = {"vocab_size": 160, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 30}
    given |= {"num_attention_heads": 32} | (
        {"use_sliding_window": True} if architecture in (QWEN2, QWEN3, QWEN3_MOE, MIMO) else {}
    )
    given |= needed(architecture, 30)
    ours = parse_dense({**given, "architectures": [architecture]})
    theirs = CLASSES[architecture](**given)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 32)
    assert ours.rms_norm_eps == (getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_epsilon)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == rope_of(theirs)["rope_theta"]
    assert ours.windows == windows_of(theirs)
    assert experts_of(ours) == experts_of_theirs(theirs)


UNKNOWN: dict[str, Any] = {
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "rope_interleaved": True,
    "use_mrope": True,
    "is_causal": False,
    "is_encoder_decoder": True,
    "pruned_heads": {"0": [1]},
    "per_layer_config": {"1": {"intermediate_size": 32}},
    "auto_map": {"AutoModelForCausalLM": "modeling.Other"},
    "activation": "relu2",
    "num_local_experts": 16,
    "compression_config": {},
    "a_switch_of_tomorrow": None,
}
GRANITE_FACTORS = {"logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier"}
# Keys of UNKNOWN that the class of an architecture in transformers reads.
READ: dict[str, set[str]] = {
    GEMMA2: {"attn_logit_softcapping", "final_logit_softcapping"},
    GRANITE: GRANITE_FACTORS,
    GRANITE_HYBRID: GRANITE_FACTORS | {"num_local_experts"},
    **{name: {"num_local_experts"} for name in (MIXTRAL, QWEN3_MOE, QWEN3_NEXT, NEMOTRON_H, QWEN3_5_MOE, GLM4_MOE)},
}


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_key_that_may_change_a_number_is_refused_by_name(architecture: str) -> None:
    read = READ.get(architecture, set())
    for key in read:
        assert parse(architecture, **{key: UNKNOWN[key]}) != parse(architecture), key
    for key in UNKNOWN.keys() - read:
        with pytest.raises(CheckpointError, match=key):
            parse(architecture, **{key: UNKNOWN[key]})


def test_all_unknown_keys_are_named_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"not understood for LlamaForCausalLM .*: one, two;"):
        parse(two=2, one=1)


@pytest.mark.parametrize("group", NEUTRAL, ids=lambda group: group.what)
def test_what_is_not_served_is_accepted_where_it_is_not_done(group: Any) -> None:
    for key, values in group.values.items():
        for value in values:
            assert parse(**{key: value}) == parse()


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_key_that_changes_no_number_is_accepted_with_any_value(architecture: str) -> None:
    for group in (*UNREAD, *ARCHITECTURES[architecture].unread):
        assert group.why.endswith(".")
        for key in group.keys:
            assert parse(architecture, **{key: "anything"}) == parse(architecture)


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_key_is_in_one_table_only(architecture: str) -> None:
    tables = [
        *(group.keys for group in (*UNREAD, *ARCHITECTURES[architecture].unread)),
        ARCHITECTURES[architecture].understood,
    ]
    tables += [frozenset(group.values) - ARCHITECTURES[architecture].understood for group in NEUTRAL]
    assert sum(map(len, tables)) == len(frozenset[str]().union(*tables))


class Recorder(dict[str, Any]):
    """Remembers which keys were asked for."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        super().__init__(raw)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_key_that_counts_as_understood_is_read(architecture: str) -> None:
    windowed = architecture in (QWEN2, QWEN3, SMOLLM3, MIMO)
    raw = {**RAW, **needed(architecture, 3), "architectures": [architecture]} | (
        {"use_sliding_window": True} if windowed else {}
    )
    raw["rope_scaling"] = PHI3_ROPE if architecture == PHI3 else LLAMA3_ROPE
    asked: set[str] = set()
    for older in (raw, {**raw, "rope_scaling": None}):
        recorder = Recorder(older)
        parse_dense(recorder)
        asked |= recorder.asked
    asked |= {"eos_token_id"}  # read by load_config, together with that of generation_config.json
    assert asked >= ARCHITECTURES[architecture].understood
    assert asked <= ARCHITECTURES[architecture].understood | {"max_window_layers", "attention_bias", "mlp_bias"}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "llama3", **LLAMA3_ROPE, "mscale": 1.0}, "not understood for rope_type 'llama3': mscale"),
        (
            {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0},
            "for rope_type 'linear': low_freq_factor",
        ),
        ({"rope_type": "default", "mrope_section": [8, 4, 4]}, "for rope_type 'default': mrope_section"),
        ({"rope_type": "default", "factor": 2.0}, "for rope_type 'default': factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_type": "llama3", "type": "linear", "factor": 2.0}, "rope_type 'llama3' and type 'linear'"),
        ({"rope_type": ["linear"]}, "rope_type \\['linear'\\]; supported are default, linear, llama3, yarn, longrope"),
    ],
)
def test_a_key_of_rope_that_may_change_a_number_is_refused_by_name(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(rope_scaling=rope)


def test_the_kinds_of_rope_that_are_understood_take_each_of_their_keys() -> None:
    values = {**LLAMA3_ROPE, **PHI3_ROPE, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 32}
    for kind, keys in ROPE_UNDERSTOOD.items():
        rope = {**{key: values.get(key) for key in keys}, "rope_type": kind, "type": kind}
        assert parse(rope_parameters=rope).rope_scaling.kind == kind


def test_the_older_rope_scaling_wins_over_rope_parameters_and_the_outer_length_over_the_inner(tmp_path: Path) -> None:
    raw = {
        **RAW, "model_type": "llama", "rope_scaling": dict(LLAMA3_ROPE), "original_max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    config.standardize_rope_params()  # as a model does before it takes its frequencies from it
    theirs = config.rope_parameters
    ours = parse_dense(raw).rope_scaling
    assert (ours.kind, ours.factor) == (theirs["rope_type"], theirs["factor"]) == ("llama3", 8.0)
    assert ours.original_positions == theirs["original_max_position_embeddings"] == 64


def rope_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Of the layers without a window, where theirs is another than that of the others; where nothing is rotated, what
    would be."""
    ropes = getattr(config, "rope_parameters", {"rope_theta": 10000.0, "rope_type": "default"})
    found: dict[str, Any] = ropes.get(FULL, ropes)
    return found


def windows_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Each layer's window as the classes of transformers have it."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


WINDOWS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    (LLAMA, {}, (0, 0, 0)),
    (LLAMA, {"sliding_window": None, "use_sliding_window": False, "layer_types": [FULL] * 3}, (0, 0, 0)),
    (MISTRAL, {}, (4096, 4096, 4096)),
    (MISTRAL, {"sliding_window": 9}, (9, 9, 9)),
    (MISTRAL, {"sliding_window": 9, "layer_types": None}, (9, 9, 9)),
    (MISTRAL, {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}, (9, 0, 9)),
    (MISTRAL, {"sliding_window": 9, "layer_types": [FULL, FULL, FULL]}, (0, 0, 0)),
    (MISTRAL, {"sliding_window": None, "layer_types": [FULL, FULL, FULL]}, (0, 0, 0)),
    (MISTRAL, {"sliding_window": 9, "use_sliding_window": True}, (9, 9, 9)),
    (QWEN2, {"sliding_window": 9}, (0, 0, 0)),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 2}, (0, 0, 4096)),
    (QWEN2, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (0, 0, 0)),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (0, 9, 9)),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 9}, (0, 0, 0)),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 9, "layer_types": [FULL, SLIDING, FULL]}, (0, 9, 0)),
    (QWEN3, {"use_sliding_window": False, "sliding_window": 9, "layer_types": [FULL] * 3}, (0, 0, 0)),
]


@pytest.mark.parametrize(("architecture", "changes", "expected"), WINDOWS, ids=str)
def test_each_layer_has_the_window_that_transformers_gives_it(
    architecture: str, changes: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    raw = {
        **RAW,
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture].model_type,
        "head_dim": 16,
        **changes,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert parse_dense(raw).windows == windows_of(AutoConfig.from_pretrained(tmp_path)) == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            QWEN2,
            {"sliding_window": 9, "layer_types": [FULL, SLIDING, FULL]},
            "layer_types has sliding_attention, and Qwen2",
        ),
        (
            MISTRAL,
            {"sliding_window": None, "layer_types": [SLIDING] * 3},
            "layer_types has sliding_attention, and Mistral",
        ),
        (MISTRAL, {"layer_types": [FULL, FULL]}, r"layer_types is \['full_attention', 'full_attention'\]"),
        (MISTRAL, {"layer_types": [FULL, FULL, "chunked_attention"]}, "layer_types is .*chunked_attention"),
        (LLAMA, {"layer_types": [FULL, FULL, SLIDING]}, "layer_types has sliding_attention, and Llama"),
        (LLAMA, {"sliding_window": 9}, "sliding_window is 9, and LlamaForCausalLM attends to all tokens"),
        (LLAMA, {"use_sliding_window": True}, "use_sliding_window is True, and LlamaForCausalLM"),
        (
            MISTRAL,
            {"sliding_window": 9, "use_sliding_window": False},
            "use_sliding_window is False and sliding_window 9",
        ),
        (MISTRAL, {"max_window_layers": 2}, "not understood for Mistral.*: max_window_layers"),
        (QWEN2, {"model_type": "qwen3"}, "model_type is 'qwen3'; Qwen2ForCausalLM has 'qwen2'"),
        (LLAMA, {"dtype": {"": "bfloat16"}}, "dtype is {'': 'bfloat16'}"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; it must be 0 or 1 for each of 3 layers"),
        (SMOLLM3, {"layer_types": [SLIDING] * 3}, "layer_types has sliding_attention, and SmolLM3"),
        (GRANITE, {"residual_multiplier": 0}, "residual_multiplier is 0; it must be a number above 0"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be at most 1"),
        (PHI3, {"partial_rotary_factor": 0.1}, "partial_rotary_factor rotates 1 of 16 numbers"),
        (PHI3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'; Phi3.* has default or"),
        (
            PHI3,
            {"auto_map": {"AutoModelForCausalLM": "other.Phi3ForCausalLM"}},
            "auto_map names 'other.Phi3ForCausalLM'",
        ),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(architecture, **changes)
