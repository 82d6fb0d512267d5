"""The tokens of a model as llguidance asks for them: the bytes of each, and how a text is tokenized.

llguidance reads `tokenizer.json` too, but it takes each added token `<...>` for a special one, whose text no grammar
can contain, and gives added tokens with accents other bytes than a completion's text has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tokenizers import Tokenizer

from runahead.runtime.grammar.spelling import token_spelling


class ModelTokens:
    """What `LLTokenizer` takes for a `TokenizerWrapper`.

    tokens: the bytes that each token spells, by token id, [vocab_size]; none for special tokens and ends.
    greedy: tokenizes a text with the longest tokens that spell it; set before the first matcher is made.
    """

    is_tokenizer_wrapper: ClassVar = True
    bos_token_id: ClassVar = None
    special_token_ids: ClassVar = ()  # the library would put them under names, by which a grammar may ask for them

    def __init__(self, tokenizer: str, vocab_size: int, ends: Sequence[int]) -> None:
        """tokenizer: what `tokenizer.json` holds. ends: tokens that end a completion, below `vocab_size`, one at least.

        Raises DecoderError, and whatever the tokenizers' library raises.
        """
        description = json.loads(tokenizer)
        self._tokenizer = Tokenizer.from_str(json.dumps(_continuing(description)))
        self._tokenizer.encode_special_tokens = True  # their texts are texts like any other
        spelled = token_spelling(self._tokenizer, description)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        for token_id in special.union(ends).intersection(range(len(spelled))):
            spelled[token_id] = b""
        self.tokens = (spelled + [b""] * vocab_size)[:vocab_size]
        self.eos_token_id = ends[0]
        self.greedy: Callable[[str], list[int]]

    def __call__(self, text: str) -> list[int]:
        """The ids that a text is read as, if they spell it: no special token, and nothing that the tokenizer's
        normalizer changes. Otherwise those of the longest tokens that do."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException:  # a panic is no Exception, and some expressions panic at long texts
            return self.greedy(text)
        if b"".join(self.tokens[token_id] for token_id in ids if token_id < len(self.tokens)) == text.encode():
            return ids
        return self.greedy(text)


def _continuing(description: dict[str, Any]) -> dict[str, Any]:
    """The description of a tokenizer that reads a text as the middle of another, whole, and puts no space before it."""
    return {
        **description,
        "truncation": None,
        "padding": None,
        "normalizer": _without_prefix(description.get("normalizer")),
        "pre_tokenizer": _without_prefix(description.get("pre_tokenizer")),
    }


def _without_prefix(part: Any) -> Any:
    """A normalizer or a pre-tokenizer, as `tokenizer.json` has it."""
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
