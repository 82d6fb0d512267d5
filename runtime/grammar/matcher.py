"""Makes llguidance's matchers for grammars over a model's tokens, always with the same limits.

The process that validates a grammar and the one that follows it both use this module, so they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runahead.runtime.grammar.model_tokens import ModelTokens

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
