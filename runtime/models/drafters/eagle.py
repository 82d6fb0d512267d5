"""Published EAGLE draft heads: finds a folder's kind, and builds EAGLE-1 heads.

An EAGLE-1 head is one Llama layer without a norm before its attention, over fuse([embedding of a token, previous hidden
state]); the hidden state is the target's after its final norm, and the layer's output predicts the next one. Embedding
and head are the target's; a tensor d2t, as in EAGLE-3 heads, may restrict guesses to frequent tokens: these make up
most of a text, and the product over the vocabulary takes most of a step.

Source: Li, Wei, Zhang, Zhang, 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", and the
tensor names of the authors' checkpoints. Frequent tokens: Zhao et al., 2025, "FR-Spec: Accelerating Large-Vocabulary
Language Models via Frequency-Ranked Speculative Sampling".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from runahead.runtime.checkpoint import CheckpointError, StoredTensor
from runahead.runtime.checkpoint.folder import FolderCheckpoint
from runahead.runtime.kernels.layers import Fuse
from runahead.runtime.models.architecture import HeadWeights, TensorReader
from runahead.runtime.models.blocks.dense import DenseConfig, attention, feed_forward, rope_of
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.config.values import flag
from runahead.runtime.models.drafters.eagle3 import is_eagle3, open_eagle3
from runahead.runtime.models.drafters.head_files import (
    HeadFiles,
    check_fits,
    check_tokens_end,
    check_width,
    read_tensors,
    targets_of,
    without_padding,
)
from runahead.runtime.models.drafters.speculators import plain_head
from runahead.runtime.models.families.dense import LLAMA
from runahead.runtime.models.read_config import parse_config

_NAMES: Final = (LLAMA.name, "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
_FUSE, _EMBEDDING, _TO_TARGET, _BODY = "model.fc", "model.embed_tokens.weight", "model.d2t", "model."


def open_eagle(
    checkpoint: FolderCheckpoint, target: ModelConfig, context: int, setting: str, context_setting: str
) -> HeadFiles:
    """Open the EAGLE-1 or EAGLE-3 head in this folder, by its configuration. target: its target. context: served tokens
    of a request. setting, context_setting: the settings' names in messages.

    Raises CheckpointError for a head of another kind, one that does not fit the target, or missing tensors.
    """
    called = f"the draft head {checkpoint.path}"
    try:
        plain = plain_head(checkpoint.config())
    except CheckpointError as error:
        raise CheckpointError(f"{called}: {error}") from error
    if is_eagle3(plain.config):
        return open_eagle3(checkpoint, plain, target, context, setting, context_setting)
    raw = dict(plain.config)
    _refuse_others(called, raw)
    given_bias = flag(raw, "bias") if raw.get("bias") is not None else None
    qkv_bias = flag(raw, "qkv_bias")
    for key in ("bias", "qkv_bias"):
        raw.pop(key, None)
    try:
        config = parse_config({**raw, "architectures": [LLAMA.name]}, ())
    except CheckpointError as error:
        raise CheckpointError(f"{called}: {error}") from error
    assert isinstance(config, DenseConfig)
    check_fits(f"{called} ({setting})", config, target, context, context_setting)
    check_width(f"{called} ({setting})", config.hidden_size, target)

    def all_of_it(tensors: TensorReader) -> HeadWeights:
        tensors.tensor((_EMBEDDING,), (target.vocab_size,), config.hidden_size)  # the copy
        return _built(config, tensors, True, True)

    tensors_of_files = read_tensors(checkpoint, all_of_it, target.vocab_size)
    stored: dict[str, StoredTensor] = {
        _BODY + plain.named(name.removeprefix(_BODY)): tensor for name, tensor in tensors_of_files.items()
    }
    if len(stored) < len(tensors_of_files):
        raise CheckpointError(f"{called} has a tensor twice, under two of its possible names")
    to_target = stored.pop(_TO_TARGET, None)
    if config.vocab_size > target.vocab_size:
        check_tokens_end(called, checkpoint, None, target.vocab_size)
    if _EMBEDDING in stored:
        stored[_EMBEDDING] = without_padding(stored[_EMBEDDING], target.vocab_size)
    targets = None
    if to_target is not None:
        known = max(1, to_target.shape[0]) if len(to_target.shape) == 1 else 1
        targets = targets_of(called, to_target, known, target, "one for each token that the head may guess")
    fuse_bias = f"{_FUSE}.bias" in stored if given_bias is None else given_bias
    own_qkv_bias = qkv_bias or config.attention_bias

    def build(tensors: TensorReader) -> HeadWeights:
        return replace(_built(config, tensors, fuse_bias, own_qkv_bias), targets=targets)

    head = HeadFiles(
        called,
        "a head of EAGLE-1",
        stored,
        build,
        {_EMBEDDING: (target.vocab_size, config.hidden_size)},  # a copy of the target's, which is used instead
        lambda name: plain.in_file(name.removeprefix(_BODY)),
    )
    head.check()
    return head


def _built(config: DenseConfig, tensors: TensorReader, fuse_bias: bool, qkv_bias: bool) -> HeadWeights:
    hidden = config.hidden_size
    fuse = Fuse(tensors.linear((_FUSE,), (hidden,), 2 * hidden, bias=fuse_bias))
    mixer = attention(config, 0, tensors, qkv_bias=qkv_bias, norm=None)
    # The first drafted token follows the first token, which has no entry.
    mixer, dense = replace(mixer, first=1), feed_forward(config, 0, tensors)
    return HeadWeights(fuse, mixer, dense, rope_of(config), tensors.parameters, hidden)


def _refuse_others(called: str, raw: Mapping[str, Any]) -> None:
    if raw.get("architectures") not in tuple([name] for name in _NAMES):
        raise CheckpointError(
            f"{called}: architectures is {raw.get('architectures')!r}; a head of EAGLE-1 has "
            f"{', '.join(_NAMES)}, and one of EAGLE-3 LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, or "
            "LlamaForCausalLM beside a draft_vocab_size"
        )
