"""Converts draft heads in the format of Speculators to the plain format.

`speculators_model_type` names the kind, `transformer_layer_config` describes the layer, and `speculators_config` how a
server drafts. Only the default proposal method is used, and it must be a chain of tokens accepted by equality. The
number of drafts is a setting here.

Source: vllm-project/speculators, whose config.py, models/eagle.py, models/eagle3 and proposals/greedy.py define keys
and tensor names; vLLM's transformers_utils/configs/speculators for a server's reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.models.config.keys import UNREAD, unread
from runahead.runtime.models.config.values import flag, number

_KIND, _HOW, _LAYER = "speculators_model_type", "speculators_config", "transformer_layer_config"
_LLAMA: Final = "llama"
_WITHOUT_EFFECT: Final = (
    unread("Which library wrote it, and how its classes begin.", "speculators_version has_no_defaults_at_init"),
    unread("Of training.", "embed_requires_grad enable_sp_ulysses"),
    unread(
        "How a library would cut the head among devices.", "base_model_ep_plan base_model_tp_plan base_model_pp_plan"
    ),
    unread("The type of numbers, which each tensor says of itself.", "dtype torch_dtype"),
    *UNREAD,
)
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "model_type": (None, "speculators", "speculator_model"),
    "tie_word_embeddings": (None, False),
    "quantization_config": (None,),
}
_ITS_CODE: Final = ("EagleSpeculatorConfig", "Eagle3SpeculatorConfig")  # in auto_map, never run


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of head. architecture: of the plain format. names: valid `architectures`. keys: read keys by their plain
    names. renamed: tensor name prefixes and their plain forms.
    """

    architecture: str
    names: frozenset[str]
    keys: Mapping[str, str]
    renamed: Mapping[str, str]


_KINDS: Final = {
    "eagle": _Kind(
        "EagleLlamaForCausalLM",
        frozenset({"EagleSpeculator", "LlamaDecoderLayer"}),
        {"fusion_bias": "bias"},
        {"fusion_fc.": "fc.", "transformer.": "layers.0."},
    ),
    "eagle3": _Kind(
        "Eagle3LlamaForCausalLM",
        frozenset({"Eagle3Speculator", "Eagle3DraftModel", "Eagle3LlamaForCausalLM"}),
        {
            key: key
            for key in (
                "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual",
                "norm_before_fc", "fc_norm", "norm_output",
            )
        },
        {},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlainHead:
    """A head's files in the plain format.

    config: the equivalent `config.json`. named: maps a file's tensor name to the plain one.
    in_file: the inverse. wrapped: it was in the format of Speculators.
    """

    config: Mapping[str, Any]
    named: Callable[[str], str] = str
    in_file: Callable[[str], str] = str
    wrapped: bool = False


def plain_head(raw: Mapping[str, Any]) -> PlainHead:
    """Convert a `config.json` in either format. Raises CheckpointError."""
    if _KIND not in raw and _HOW not in raw:
        return PlainHead(raw)
    if raw.get(_KIND) not in tuple(_KINDS):
        raise CheckpointError(
            f"{_KIND} is {raw.get(_KIND)!r}; of the format of Speculators {' and '.join(_KINDS)} are served"
        )
    kind = _KINDS[raw[_KIND]]
    if raw[_KIND] == "eagle":
        raw = _first_kind(raw)
    elif raw.get("norm_before_residual") is None:
        raise CheckpointError(
            "config.json has no norm_before_residual, which is false for the library that writes the format and true "
            "for vLLM, which serves it: add the one that the head was trained with"
        )
    layer = raw.get(_LAYER)
    if not isinstance(layer, dict):
        raise CheckpointError(f"{_LAYER} is {layer!r}; it must be an object that says what the head's layer is")
    if layer.get("model_type") not in (None, _LLAMA):
        raise CheckpointError(f"{_LAYER} has model_type {layer['model_type']!r}; a head's layer of a Llama is served")
    _check_names(raw, kind)
    _check_proposals(raw)
    _check_keys(raw, kind)
    own = {there: raw[key] for key, there in kind.keys.items() if raw.get(key) is not None}
    if clash := sorted(own.keys() & layer.keys()):
        raise CheckpointError(f"{_LAYER} has {', '.join(clash)}, which stands beside it, too")
    return PlainHead(
        {**layer, **own, "architectures": [kind.architecture]},
        lambda name: _begun_anew(name, kind.renamed),
        lambda name: _begun_anew(name, {there: here for here, there in kind.renamed.items()}),
        wrapped=True,
    )


def _begun_anew(name: str, renamed: Mapping[str, str]) -> str:
    for begin, other in renamed.items():
        if name.startswith(begin):
            return other + name.removeprefix(begin)
    return name


def _first_kind(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an EAGLE-1 configuration, without its further keys. Raises CheckpointError."""
    if raw.get("transformer_layer_architecture", "LlamaDecoderLayer") != "LlamaDecoderLayer":
        raise CheckpointError(
            f"transformer_layer_architecture is {raw['transformer_layer_architecture']!r}; LlamaDecoderLayer is served"
        )
    if flag(raw, "layernorms"):
        raise CheckpointError(
            "layernorms is true; only false is served: it is not documented with which hidden state such a head "
            "continues"
        )
    flag(raw, "fusion_bias")
    more = {"transformer_layer_architecture", "layernorms"}
    return {"fusion_bias": False, **{key: value for key, value in raw.items() if key not in more}}


def _check_names(raw: Mapping[str, Any], kind: _Kind) -> None:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not kind.names.issuperset(map(str, names)):
        raise CheckpointError(
            f"architectures is {names!r}; a head of {_KIND} {raw[_KIND]} has one of {', '.join(sorted(kind.names))}"
        )
    code = raw.get("auto_map") or {}
    if not isinstance(code, dict) or any(str(name).rpartition(".")[2] not in _ITS_CODE for name in code.values()):
        raise CheckpointError(
            f"auto_map is {code!r}, which names code in the checkpoint: none is ever run, and only Speculators' code "
            f"is known, {' and '.join(_ITS_CODE)}"
        )


def _check_proposals(raw: Mapping[str, Any]) -> None:
    """Check that the proposal is a chain of tokens accepted by equality with the model's. Raises CheckpointError."""
    how = raw.get(_HOW)
    if not isinstance(how, dict):
        raise CheckpointError(f"{_HOW} is {how!r}; it must be an object with proposal_methods")
    if how.get("algorithm", raw[_KIND]) != raw[_KIND]:
        raise CheckpointError(f"{_KIND} is {raw[_KIND]!r}, and algorithm in {_HOW} {how['algorithm']!r}")
    if unknown := sorted(how.keys() - {"algorithm", "default_proposal_method", "proposal_methods", "verifier"}):
        raise CheckpointError(f"{_HOW} has keys that are not understood: {', '.join(unknown)}")
    methods = how.get("proposal_methods")
    if not isinstance(methods, list) or not methods or any(not isinstance(method, dict) for method in methods):
        raise CheckpointError(f"proposal_methods is {methods!r}; it must be a list of objects")
    default = how.get("default_proposal_method", methods[0].get("proposal_type"))
    chosen = [method for method in methods if method.get("proposal_type") == default]
    if default != "greedy" or len(chosen) != 1:
        raise CheckpointError(
            f"default_proposal_method is {default!r}, and {len(chosen)} of proposal_methods are of this type; one of "
            "type greedy is served, which proposes a chain of tokens"
        )
    known = {"proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance"}
    if unknown := sorted(chosen[0].keys() - known):
        raise CheckpointError(f"the proposal method greedy has keys that are not understood: {', '.join(unknown)}")
    if number(chosen[0], "verifier_accept_k", int, 1) > 1:
        raise CheckpointError(
            f"verifier_accept_k is {chosen[0]['verifier_accept_k']}: it asks that tokens be kept which are not the "
            "model's, and no draft changes a token here; with 1 the head is served"
        )


def _check_keys(raw: Mapping[str, Any], kind: _Kind) -> None:
    for key, values in _NEUTRAL.items():
        if raw.get(key) not in values:
            raise CheckpointError(f"{key} is {raw[key]!r}; a head is served where it is {values[-1]!r} or absent")
    known = {_KIND, _HOW, _LAYER, "architectures", "auto_map", *kind.keys, *_NEUTRAL}
    known = known.union(*(group.keys for group in _WITHOUT_EFFECT))
    if unknown := sorted(raw.keys() - known):
        raise CheckpointError(
            f"config.json has keys that are not understood for {_KIND} {raw[_KIND]} and may change what the head "
            f"computes: {', '.join(unknown)}; a key that is known to change nothing can be taken out of the file"
        )
