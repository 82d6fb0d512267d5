"""A grammar over the tokens of a model: what llguidance makes of a grammar's text, always within the same bounds.

Who looks whether a grammar is one, and who follows it token by token, need not be one process. Both come here, so that
what the first has accepted is what the second is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runahead.runtime.grammar.model_tokens import ModelTokens

# Of what a grammar may cost, in the library's own units: a mask takes some 20 ms at most, and a row of the parser has
# so many items. `verbose_errors` would repeat the grammar, and tokens that were sampled, in an error's text.
_LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
_SILENT: Final = 0  # otherwise the library writes to standard error what it is given


class VocabularyError(ValueError):
    """The tokens of a model are of a kind that no grammar can be followed in. The sentence says why."""


class GrammarError(ValueError):
    """A grammar's text is none, or costs more than it may. The message is the library's, on several lines perhaps."""


def load_vocabulary(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of a model, as grammars see them. It takes some 1.5 s for 150,000 of them.

    tokenizer: what `tokenizer.json` holds. vocab_size: of the logits, more or fewer than the tokenizer has.
    eos_token_ids: what a completed grammar ends with, any of them; one that is beyond the logits, as some files of
    models name, is never drawn and left out. Raises VocabularyError.
    """
    ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]
    if not ends:
        raise VocabularyError("the model has no end-of-sequence token, and a completed grammar would never end")
    try:
        tokens = ModelTokens(tokenizer, vocab_size, ends)
        vocabulary = LLTokenizer(tokens, eos_token=ends)
    except Exception as error:  # the libraries raise nothing narrower
        raise VocabularyError(
            f"the model's tokenizer is of a kind that grammars are not followed in: {error}"
        ) from error
    tokens.greedy = vocabulary.greedy_tokenize
    return vocabulary


def new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """What follows a grammar from its beginning. Of a vocabulary there may be many at a time. Raises GrammarError.

    grammar: the library's own JSON, `{"grammars": [...]}`, as `Submit.structure` has it.
    """
    matcher = LLMatcher(vocabulary, grammar, log_level=_SILENT, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
