"""Draft heads of EAGLE-1 as they are published: what a folder holds, held against the model that it is to draft for.

The head is one Llama layer without a norm in front of its attention, over fuse([embedding of a token, hidden state of
the position before it]); the hidden state is the target's after its final norm, and what the layer leaves is one more
such hidden state. Embedding and head are the target's.

Source: Li, Wei, Zhang, Zhang, 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", and the
tensors' names of the checkpoints that its authors have published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import Checkpoint, CheckpointError, StoredTensor
from runahead.runtime.models.architecture import HeadWeights, TensorReader, TensorStack
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.config_values import flag
from runahead.runtime.models.dense_decoder import attention, feed_forward, rope_of
from runahead.runtime.models.llama import LLAMA, LlamaConfig
from runahead.runtime.models.read_config import parse_config
from runahead.runtime.models.weights import Pack, copy_stored

_NAMES: Final = (LLAMA.name, "EagleLlamaForCausalLM")
_FUSE, _EMBEDDING, _BODY = "model.fc", "model.embed_tokens.weight", "model."


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head whose files fit its target. No weight is read yet.

    config: of its layer, as of a Llama with one. stored: its tensors, by the names that a whole Llama would give them.
    fuse_bias: fuse adds a bias. qkv_bias: as the attention of a Qwen2.
    """

    config: LlamaConfig
    stored: Mapping[str, StoredTensor]
    fuse_bias: bool
    qkv_bias: bool

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a KV block: keys and values of the head's layer, and the target's hidden states, in float32."""
        numbers = 2 * self.config.num_kv_heads * self.config.head_dim + self.config.hidden_size
        return block_size * numbers * torch.float32.itemsize

    def weights(self, pack: Pack) -> HeadWeights:
        """On the CPU, in float32. Raises CheckpointError."""

        def fill(stack: TensorStack) -> torch.Tensor:
            whole = torch.empty((sum(stack.rows), *stack.columns))
            for name, part in zip(stack.names, whole.split(stack.rows), strict=True):
                copy_stored(self.stored[name], part)
            return whole

        return self._built(TensorReader(fill, pack))

    def _built(self, tensors: TensorReader) -> HeadWeights:
        config, hidden = self.config, self.config.hidden_size
        fuse = tensors.linear((_FUSE,), (hidden,), 2 * hidden, bias=self.fuse_bias)
        mixer = attention(
            config, 0, tensors, qkv_bias=self.qkv_bias, output_bias=config.attention_bias, norm=None
        )  # fmt: skip
        # What follows the first token is the first that is drafted: nothing was ever made of that token itself.
        mixer, dense = replace(mixer, first=1), feed_forward(config, 0, tensors, bias=config.mlp_bias)
        return HeadWeights(fuse, mixer, dense, rope_of(config), tensors.parameters)

    def check(self, path: object) -> None:
        """Raises CheckpointError, naming the tensor, if one is missing, unknown, or of another shape."""
        stacks: list[TensorStack] = []

        def fill(stack: TensorStack) -> torch.Tensor:
            stacks.append(stack)
            return torch.empty((sum(stack.rows), *stack.columns), device="meta")

        self._built(TensorReader(fill, lambda weight: weight))
        expected = {name: stack.shape(i) for stack in stacks for i, name in enumerate(stack.names)}
        for name, shape in expected.items():
            if name not in self.stored:
                raise CheckpointError(f"the draft head {path} has no tensor {name.removeprefix(_BODY)}")
            self.stored[name].check(shape)
        if _EMBEDDING in self.stored:  # a copy of the target's, which is used
            self.stored[_EMBEDDING].check((self.config.vocab_size, self.config.hidden_size))
        for name in self.stored:
            if name not in expected and name != _EMBEDDING:
                raise CheckpointError(
                    f"the draft head {path} has a tensor {name.removeprefix(_BODY)}, which a head of EAGLE-1 does not "
                    "have"
                )


def open_eagle(
    checkpoint: Checkpoint, target: ModelConfig, context: int, setting: str, context_setting: str
) -> EagleHead:
    """The head in this folder. target: the model that it drafts for. context: tokens of a request that are served.
    setting, context_setting: what messages call the one that names the folder, and the one of the context.

    Raises CheckpointError for a head that is of another kind, does not fit the target, or lacks what it needs.
    """
    path, raw = checkpoint.path, dict(checkpoint.config())
    _refuse_others(path, raw)
    given_bias = flag(raw, "bias") if raw.get("bias") is not None else None
    qkv_bias = flag(raw, "qkv_bias")
    for key in ("bias", "qkv_bias"):
        raw.pop(key, None)
    try:
        config = parse_config({**raw, "architectures": [LLAMA.name]}, ())
    except CheckpointError as error:
        raise CheckpointError(f"the draft head {path}: {error}") from error
    assert isinstance(config, LlamaConfig)
    _check_fits(f"the draft head {path} ({setting})", config, target, context, context_setting)
    stored = {
        name if name.startswith(_BODY) else _BODY + name: tensor for name, tensor in checkpoint.tensors().items()
    }  # fmt: skip
    fuse_bias = f"{_FUSE}.bias" in stored if given_bias is None else given_bias
    head = EagleHead(config, stored, fuse_bias, qkv_bias or config.attention_bias)
    head.check(path)
    return head


def may_have_head(target: ModelConfig) -> bool:
    """Does a model leave the hidden states that a head is made for? Where its logits are scaled, the last norm is."""
    return bool(getattr(target, "logits_scaling", 1.0) == 1.0)


def _refuse_others(path: object, raw: Mapping[str, Any]) -> None:
    if "draft_vocab_size" in raw or "Eagle3" in str(raw.get("architectures")):
        raise CheckpointError(
            f"the draft head {path} is of EAGLE-3, which hidden states of three layers go into; heads of EAGLE-1 are "
            "served"
        )
    if raw.get("architectures") not in tuple([name] for name in _NAMES):
        raise CheckpointError(
            f"the draft head {path}: architectures is {raw.get('architectures')!r}; that of a head of EAGLE-1 is "
            f"{' or '.join(_NAMES)}"
        )


def _check_fits(head: str, config: LlamaConfig, target: ModelConfig, context: int, context_setting: str) -> None:
    if not may_have_head(target):
        raise CheckpointError(
            f"{head} can't draft for this {target.architecture}, whose logits_scaling is in the hidden states that a "
            "head would read"
        )
    if config.num_layers != 1:
        raise CheckpointError(f"{head} has {config.num_layers} layers; heads of one layer are served")
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{head} has a vocabulary of {config.vocab_size} tokens, and the model one of {target.vocab_size}: it was "
            "made for another model"
        )
    if config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{head} reads hidden states of {config.hidden_size} numbers, and the model leaves {target.hidden_size}: "
            "it was made for another model"
        )
    if config.max_position_embeddings < context:
        raise CheckpointError(
            f"{head} has a context of {config.max_position_embeddings} tokens, and {context} are served: set "
            f"{context_setting} to {config.max_position_embeddings} or less"
        )
