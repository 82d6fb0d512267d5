"""Makes llguidance's matchers for grammars over a model's tokens, always with the same limits.

The process that validates a grammar and the one that follows it both use this module, so they agree. It gives the
library the bytes of each token: llguidance can read `tokenizer.json`, but it takes each added token `<...>` for a
special one, which no grammar's text can contain, and gives added tokens with accents other bytes than a completion's
text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from runahead.runtime.grammar.spelling import token_spelling

# Limits in the library's units: a mask takes about 20 ms at most, and a parser row has at most this many items.
# `verbose_errors` would quote the grammar and sampled tokens.
_LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
_SILENT: Final = 0  # otherwise the library writes its inputs to standard error


class ModelTokens:
    """The `TokenizerWrapper` of `LLTokenizer`.

    tokens: bytes by token id, [vocab_size]; empty for special tokens and ends.
    greedy: tokenizes with the longest matching tokens; set before the first matcher is made.
    """

    is_tokenizer_wrapper: ClassVar = True
    bos_token_id: ClassVar = None
    special_token_ids: ClassVar = ()  # grammars could otherwise name them

    def __init__(self, tokenizer: str, vocab_size: int, ends: Sequence[int]) -> None:
        """Prepare the tokenizer. tokenizer: content of `tokenizer.json`. ends: tokens that end a completion, below
        `vocab_size`, at least one.

        Raises DecoderError, and the tokenizer library's errors.
        """
        description = json.loads(tokenizer)
        self._tokenizer = Tokenizer.from_str(json.dumps(_continuing(description)))
        self._tokenizer.encode_special_tokens = True  # their texts are ordinary text here
        spelled = token_spelling(self._tokenizer, description)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        for token_id in special.union(ends).intersection(range(len(spelled))):
            spelled[token_id] = b""
        self.tokens = (spelled + [b""] * vocab_size)[:vocab_size]
        self.eos_token_id = ends[0]
        self.greedy: Callable[[str], list[int]]

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text if its tokens spell it, without special tokens or normalization; otherwise use the longest
        matching tokens.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException:  # panics derive from BaseException, and some expressions panic at long texts
            return self.greedy(text)
        if b"".join(self.tokens[token_id] for token_id in ids if token_id < len(self.tokens)) == text.encode():
            return ids
        return self.greedy(text)


def _continuing(description: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer description that treats a text as the middle of another: complete, and without a space before
    it.
    """
    return {
        **description,
        "truncation": None,
        "padding": None,
        "normalizer": _without_prefix(description.get("normalizer")),
        "pre_tokenizer": _without_prefix(description.get("pre_tokenizer")),
    }


def _without_prefix(part: Any) -> Any:
    """Remove the prefix space of a normalizer or pre-tokenizer of `tokenizer.json`."""
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return part | {"add_prefix_space": False}
        case {"type": "Sequence", "normalizers": list(parts)}:
            return part | {"normalizers": [kept for one in parts if (kept := _without_prefix(one))]}
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return part | {"pretokenizers": [_without_prefix(one) for one in parts]}
    return part


class VocabularyError(ValueError):
    """The model's tokens can't be used with grammars. The sentence says why."""


class GrammarError(ValueError):
    """A grammar is invalid or too costly. The message is the library's, possibly several lines."""


def load_vocabulary(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load a model's tokens for grammars, about 1.5 s for 150,000.

    tokenizer: content of `tokenizer.json`. vocab_size: of the logits, which may differ from the tokenizer's.
    eos_token_ids: tokens that may end a completed grammar; those beyond the logits, which some models' files name, are
        left out. Raises VocabularyError.
    """
    ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]
    if not ends:
        raise VocabularyError("the model has no end-of-sequence token, and a completed grammar would never end")
    try:
        tokens = ModelTokens(tokenizer, vocab_size, ends)
        vocabulary = LLTokenizer(tokens, eos_token=ends)
    except Exception as error:  # the libraries raise nothing more specific
        raise VocabularyError(
            f"the model's tokenizer is of a kind that grammars are not followed in: {error}"
        ) from error
    tokens.greedy = vocabulary.greedy_tokenize
    return vocabulary


def new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Make a matcher at a grammar's beginning. Raises GrammarError.

    grammar: the library's JSON, `{"grammars": [...]}`, as in `Submit.structure`.
    """
    matcher = LLMatcher(vocabulary, grammar, log_level=_SILENT, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
