"""Known keys of `config.json`: keys that are read, and keys without effect, with the reason.

These are common to all architectures; each architecture's file has its own. A key in no table is refused by name, since
it may change what the model computes. The reference is `transformers` with the class of the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Unread:
    """Keys without effect for any value, and why."""

    why: str
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Neutral:
    """Keys of unsupported features, with the values that turn each off and the feature's name."""

    what: str
    values: Mapping[str, tuple[Any, ...]]


def unread(why: str, keys: str) -> Unread:
    return Unread(why, frozenset(keys.split()))


# Read for every architecture.
READ_BY_ALL: Final = frozenset(
    "architectures model_type vocab_size hidden_size num_hidden_layers max_position_embeddings tie_word_embeddings "
    "bos_token_id eos_token_id dtype torch_dtype quantization_config".split()
)

# Keys of `rope_scaling` or `rope_parameters` for each kind of scaling.
_ROPE: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
ROPE_UNDERSTOOD: Final = {
    "default": _ROPE,
    "linear": _ROPE | {"factor"},
    "llama3": _ROPE | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _ROPE.union(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
        "truncate".split()
    ),
    "longrope": _ROPE.union(
        "factor original_max_position_embeddings attention_factor short_factor long_factor".split()
    ),
}
ROPE_UNREAD: Final = unread(
    "The length before the context was stretched: the default does not stretch, and linear divides by its factor.",
    "original_max_position_embeddings",
)

UNREAD: Final = (
    unread(
        "Where the file comes from, what wrote it, and what it holds for another program.",
        "_name_or_path name_or_path model_name _commit_hash transformers_version is_llama_config unsloth_fixed "
        "unsloth_version transformers.js_config",
    ),
    unread(
        "Of training: nothing is drawn, dropped or noised at inference.",
        "initializer_range attention_dropout neftune_noise_alpha gradient_checkpointing",
    ),
    unread(
        "How a library cuts or keeps the computation, whose result is the same: `pretraining_tp` and "
        "`chunk_size_feed_forward` cut products, `use_cache` keeps keys and values, the others choose code.",
        "pretraining_tp chunk_size_feed_forward use_cache attn_implementation _attn_implementation "
        "_attn_implementation_autoset _flash_attn_2_enabled torchscript use_bfloat16",
    ),
    unread(
        "What a call of the library returns beside the logits, and in which form.",
        "output_attentions output_hidden_states return_dict tf_legacy_loss tie_last_hidden_states",
    ),
    unread(
        "Of heads for other tasks, which a causal language model does not have.",
        "id2label label2id num_labels problem_type finetuning_task task_specific_params",
    ),
    unread(
        "Of the tokenizer, and of padding: a launch masks its padded rows, whatever token they hold.",
        "pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix",
    ),
    unread(
        "Lengths that tools have noted: `max_position_embeddings` says what a request may hold.",
        "max_sequence_length model_max_length tokenizer_model_max_length",
    ),
    unread("Whether a class that can also encode decodes: these do nothing else.", "is_decoder"),
    unread(
        "Defaults of a library's `generate`: here a request says how it is sampled, or takes the contract's default.",
        "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty "
        "temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate "
        "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
        "suppress_tokens begin_suppress_tokens epsilon_cutoff eta_cutoff encoder_repetition_penalty "
        "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
        "target_lookbehind",
    ),
)

BIASES_AS_THEY_ARE: Final = (
    "The architecture has biases or has none, whatever this says; a tensor too many is refused by its name."
)

NEUTRAL: Final = (
    Neutral("bounds logits by a tanh", {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}),
    Neutral(
        "scales the embedding, a residual sum, the attention's logits or the model's",
        {
            "embedding_multiplier": (None, 1),
            "residual_multiplier": (None, 1),
            "logits_scaling": (None, 1),
            "logit_scale": (None, 1),
            "attention_multiplier": (None,),  # 1 is not neutral: it would replace 1 / sqrt(head_dim)
            "query_pre_attn_scalar": (None,),
        },
    ),
    Neutral("gives the head a bias", {"lm_head_bias": (None, False)}),
    Neutral("gives some layers another attention", {"full_attn_mod": (None, 1)}),
    Neutral("stretches positions", {"interpolate_factor": (None, 1)}),
    Neutral("clips queries, keys and values", {"clip_qkv": (None,)}),
    Neutral("pairs the rotated numbers of a head in another way", {"rope_interleaved": (None, False)}),
    Neutral("gives a token several positions", {"use_mrope": (None, False)}),
    Neutral("names another feed-forward", {"activation": (None, "swiglu")}),
    Neutral(
        "lets a token attend to those after it",
        {"is_causal": (None, True), "use_bidirectional_attention": (None, False)},
    ),
    Neutral(
        "adds an encoder",
        {
            "is_encoder_decoder": (None, False),
            "add_cross_attention": (None, False),
            "cross_attention_hidden_size": (None,),
            "tie_encoder_decoder": (None, False),
        },
    ),
    Neutral("removes heads", {"pruned_heads": (None, {})}),
    Neutral("gives a layer a different shape", {"per_layer_config": (None, {})}),
    Neutral("names code of the checkpoint's own, which is never run", {"auto_map": (None, {})}),
)
