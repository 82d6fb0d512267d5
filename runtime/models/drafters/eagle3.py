"""Published EAGLE-3 draft heads, checked against their target model.

The head reads the outputs of three target layers, which a product combines to a hidden state. Its one layer is a
Llama's whose queries, keys and values come from [norm(embedding of a token), norm(previous hidden state)], twice the
width; the residual is the hidden state, and the output predicts the next one. A norm and the head's matrix give logits
over its own vocabulary: its token i is the target's token i + d2t[i].

Other trainers have added norms, each with a key in `config.json`: `norm_before_residual` makes norm(hidden state) the
residual; `norm_before_fc` normalizes the joined inputs of the first product, `fc_norm` each layer's input; with
`norm_output` the next step gets the hidden state after the last norm.

Sources: Li, Wei, Zhang, Zhang, 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", and the authors' model definition and tensor names. For the norms: the model definitions of
Speculators (vllm-project/speculators, models/eagle3), which trains such heads, and of vLLM
(model_executor/models/llama_eagle3.py), which serves them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError, StoredTensor
from runahead.runtime.checkpoint.folder import FolderCheckpoint
from runahead.runtime.kernels.layers import Fuse, Norm
from runahead.runtime.models.architecture import HeadWeights, TensorReader
from runahead.runtime.models.blocks.dense import DenseConfig, attention, feed_forward, rope_of
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.config.values import flag, number
from runahead.runtime.models.drafters.head_files import (
    HeadFiles,
    check_fits,
    check_tokens_end,
    check_width,
    is_padded,
    read_tensors,
    targets_of,
    whole_tensor,
    without_padding,
)
from runahead.runtime.models.drafters.speculators import PlainHead
from runahead.runtime.models.families.dense import LLAMA
from runahead.runtime.models.read_config import parse_config

_NAMES: Final = (LLAMA.name, "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_BODY, _LAYER, _IN_FILE = "model.", "model.layers.0.", "midlayer."
_FUSE, _NORM, _EMBEDDING, _HEAD = "model.fc", "model.norm", "model.embed_tokens.weight", "lm_head.weight"
_READ_NORM, _READ_NORMS = "model.input_norm", "model.fc_norm."  # over the joined inputs, and over each by number
_TO_TARGET, _TO_DRAFT = "d2t", "t2d"  # the second has for each of the target's tokens whether the first has it
_READ: Final = 3  # layers of the target
_LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"
_NORMS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Keys of this kind that change the computation, with the only supported value. NVIDIA's Model Optimizer writes them: a
# norm of the embedding and one before the head's matrix, without the norms of a multi-token prediction head.
_ONLY: Final = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}  # fmt: skip
_GUESSES: Final = "parallel_draft_step"  # of one step of the head
# Keys of further layers or guesses in a step, which such a head does not have.
_WITHOUT_EFFECT: Final = ("next_layer_regular", "parallel_draft_heads_num_layers")


def _norms(own: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of the norms that a head has beside the authors' definition."""
    found = frozenset(key for key in _NORMS if flag(own, key))
    if found >= {"norm_before_fc", "fc_norm"}:
        raise CheckpointError(
            "norm_before_fc and fc_norm are both true: a norm over all that is read and one over each are never "
            "trained together"
        )
    return found


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Whether `config.json` describes an EAGLE-3 head."""
    return "draft_vocab_size" in raw or "eagle3" in str(raw.get("architectures")).lower()


def open_eagle3(
    checkpoint: FolderCheckpoint,
    plain: PlainHead,
    target: ModelConfig,
    context: int,
    setting: str,
    context_setting: str,
) -> HeadFiles:
    """Open a head for which `is_eagle3` is true, like `runahead.runtime.models.drafters.eagle.open_eagle`. plain: its
    `config.json`.
    """
    called = f"the draft head {checkpoint.path}"
    try:
        config, raw = _read(plain.config)
        reads, norms = _layers_read(raw, target, entered=plain.wrapped), _norms(raw)
        known = number(raw, "draft_vocab_size", int, config.vocab_size)
        width = number(raw, "target_hidden_size", int, target.hidden_size)
    except CheckpointError as error:
        raise CheckpointError(f"{called}: {error}") from error
    check_fits(f"{called} ({setting})", config, target, context, context_setting)
    check_width(f"{called} ({setting})", width, target)
    if known > config.vocab_size:
        raise CheckpointError(f"{called}: draft_vocab_size is {known}, and vocab_size {config.vocab_size}")

    def built(
        tensors: TensorReader, has: Container[str], known: int, targets: torch.Tensor | None = None
    ) -> HeadWeights:
        return _built(config, tensors, reads, norms, target, has, known, targets)

    tensors_of_files = read_tensors(
        checkpoint, lambda tensors: built(tensors, (_EMBEDDING, _HEAD), known), target.vocab_size
    )
    stored = {_name(name): tensor for name, tensor in tensors_of_files.items()}
    if len(stored) < len(tensors_of_files):
        raise CheckpointError(f"{called} has a tensor twice, under two of its possible names")
    vocab = target.vocab_size
    if _TO_DRAFT in stored and stored[_TO_DRAFT].shape not in ((vocab,), (config.vocab_size,)):
        raise CheckpointError(
            f"{called}: tensor t2d must say of each of the model's {vocab} tokens whether the draft vocabulary has it"
        )
    if config.vocab_size > vocab:
        check_tokens_end(called, checkpoint, stored.get(_TO_DRAFT), vocab)
    if _TO_TARGET not in stored and is_padded(known, vocab):
        known = vocab
    _check_own(called, config, target, stored, known)
    targets = (
        targets_of(called, stored[_TO_TARGET], known, target, "as draft_vocab_size says")
        if _TO_TARGET in stored
        else None
    )

    if _TO_DRAFT in stored:
        _check_draft_vocabulary(called, stored[_TO_DRAFT], vocab, known, targets)
    read_apart = {name: tensor for name, tensor in stored.items() if name not in (_TO_TARGET, _TO_DRAFT)}
    for name, tokens in ((_EMBEDDING, vocab), (_HEAD, known)):
        if name in read_apart:
            read_apart[name] = without_padding(read_apart[name], tokens)
    in_file = str if plain.wrapped else _name_in_file
    head = HeadFiles(
        called,
        "a head of EAGLE-3",
        read_apart,
        lambda tensors: built(tensors, stored, known, targets),
        in_file=lambda name: in_file(name.removeprefix(_BODY)),
    )
    head.check()
    return head


def _read(raw: Mapping[str, Any]) -> tuple[DenseConfig, dict[str, Any]]:
    """Read its layer, as a Llama with one layer, and the head's further keys."""
    if raw.get("architectures") not in tuple([name] for name in _NAMES):
        raise CheckpointError(
            f"architectures is {raw.get('architectures')!r}; a head of EAGLE-3 has {', '.join(_NAMES)}"
        )
    inner = raw.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise CheckpointError(f"eagle_config is {inner!r}; it must be an object")
    own_keys = {
        "draft_vocab_size", "target_hidden_size", "eagle_config", _LAYER_IDS, _GUESSES, *_NORMS, *_ONLY,
        *_WITHOUT_EFFECT,
    }  # fmt: skip
    of_llama = {key: value for key, value in raw.items() if key not in own_keys}
    given = {**inner, **{key: value for key, value in raw.items() if value is not None}}
    own = {key: value for key, value in given.items() if key in own_keys - {"eagle_config"}}
    for key, only in _ONLY.items():
        if own.get(key) is not None and flag(own, key) is not only:
            raise CheckpointError(f"{key} is {str(not only).lower()}; only {str(only).lower()} is served")
    if number(own, _GUESSES, int, 1, low=0) > 1:
        raise CheckpointError(f"{_GUESSES} is {own[_GUESSES]}; heads that guess one token in a step are served")
    if unknown := sorted(inner.keys() - own_keys):
        raise CheckpointError(f"eagle_config has keys that are not understood: {', '.join(unknown)}")
    config = parse_config({**of_llama, "architectures": [LLAMA.name]}, ())
    assert isinstance(config, DenseConfig)
    return config, own


def _layers_read(own: Mapping[str, Any], target: ModelConfig, *, entered: bool) -> tuple[int, ...]:
    """Return after how many target layers each hidden state is read. entered: numbers are layers that a state enters,
    whatever the list.

    Two numberings are in use; in both the lowest is the second layer's output. In a list that begins with 1, a number
    is the layer, from 0, that outputs the state; otherwise the layer that it enters, as in the authors' code.
    """
    layers = target.num_layers
    given = own.get(_LAYER_IDS)
    if given is None or given == []:
        if layers < _READ:
            raise CheckpointError(f"it reads what {_READ} layers leave, and the model has {layers} layers")
        given = (2, layers // 2, layers - _READ)
    if (
        not isinstance(given, list | tuple)
        or len(given) != _READ
        or any(not isinstance(one, int) or isinstance(one, bool) for one in given)
    ):
        raise CheckpointError(f"{_LAYER_IDS} is {given!r}; it must be a list of {_READ} layers")
    reads = tuple(one + 1 for one in given) if given[0] == 1 and not entered else tuple(given)
    if min(reads) < 0 or max(reads) > layers:
        raise CheckpointError(
            f"it reads the outputs of the model's layers, {_LAYER_IDS} {list(given)}, and the model has {layers} layers"
        )
    return reads


def _name(name: str) -> str:
    """Map a file's tensor name to the name here."""
    name = name.removeprefix(_BODY)
    if name in (_HEAD, _TO_TARGET, _TO_DRAFT):
        return name
    return _LAYER + name.removeprefix(_IN_FILE) if name.startswith(_IN_FILE) else _BODY + name


def _name_in_file(name: str) -> str:
    """Map a name without `_BODY` to the file's."""
    layer = _LAYER.removeprefix(_BODY)
    return _IN_FILE + name.removeprefix(layer) if name.startswith(layer) else name


def _check_own(
    called: str, config: DenseConfig, target: ModelConfig, stored: Mapping[str, StoredTensor], known: int
) -> None:
    """Check the head's own tensors and those taken from the target."""
    width, vocab = config.hidden_size, target.vocab_size
    if _EMBEDDING not in stored and width != target.hidden_size:
        raise CheckpointError(
            f"{called} has no tensor embed_tokens.weight, and the model's embedding, of {target.hidden_size} numbers a "
            f"token, is none for a head of {width}"
        )
    if _HEAD not in stored and (width, known) != (target.hidden_size, vocab):
        raise CheckpointError(
            f"{called} has no tensor lm_head.weight, and the model's own, {vocab} tokens of {target.hidden_size} "
            f"numbers, is none for a draft vocabulary of {known} tokens and a head of {width}"
        )
    if _TO_TARGET not in stored and known != vocab:
        raise CheckpointError(
            f"{called} has no tensor d2t: nothing says which of the model's {vocab} tokens the {known} of its draft "
            "vocabulary are"
        )


def _check_draft_vocabulary(
    called: str, in_draft: StoredTensor, vocab: int, known: int, targets: torch.Tensor | None
) -> None:
    """Raise CheckpointError unless tensors t2d and d2t name the same tokens. targets: from d2t; None: all."""
    named = whole_tensor(in_draft)
    expected = torch.zeros(vocab, dtype=torch.bool)
    expected[torch.arange(known) if targets is None else targets] = True
    if named is None or not torch.equal(named[:vocab] != 0, expected):
        raise CheckpointError(f"{called}: tensor t2d names other tokens than d2t")


def _built(
    config: DenseConfig,
    tensors: TensorReader,
    reads: tuple[int, ...],
    norms: frozenset[str],
    target: ModelConfig,
    has: Container[str],
    known: int,
    targets: torch.Tensor | None,
) -> HeadWeights:
    width, of_target, eps = config.hidden_size, target.hidden_size, config.rms_norm_eps
    read_norms: tuple[Norm, ...] = ()
    if "norm_before_fc" in norms:
        read_norms = (tensors.norm(_READ_NORM, _READ * of_target, eps),)
    elif "fc_norm" in norms:
        read_norms = tuple(tensors.norm(f"{_READ_NORMS}{i}", of_target, eps) for i in range(_READ))
    narrow = tensors.linear((_FUSE,), (width,), _READ * of_target, bias=False)
    fuse = Fuse(
        None,
        tensors.norm(f"{_LAYER}input_layernorm", width, eps),
        tensors.norm(f"{_LAYER}hidden_norm", width, eps),
        normed_residual="norm_before_residual" in norms,
    )
    mixer = attention(config, 0, tensors, norm=None, inputs=2 * width)
    # The first drafted token follows the first token, which has no entry.
    mixer = replace(mixer, first=1, joined=True)
    dense = feed_forward(config, 0, tensors)
    norm = tensors.norm(_NORM, width, eps)
    embedding = tensors.tensor((_EMBEDDING,), (target.vocab_size,), width) if _EMBEDDING in has else None
    lm_head = tensors.pack(tensors.tensor((_HEAD,), (known,), width)) if _HEAD in has else None
    return HeadWeights(
        fuse, mixer, dense, rope_of(config), tensors.parameters, width, reads, narrow, read_norms, norm,
        "norm_output" in norms, embedding=embedding, lm_head=lm_head, targets=targets,
    )  # fmt: skip
