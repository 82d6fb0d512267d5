"""Validates Tokenize, Detokenize and RenderChat."""

from __future__ import annotations

from runahead.service.contract.chat import CheckedChat, check_chat
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.violations import Violations
from runahead.v1 import DetokenizeRequest, RenderChatRequest, TokenizeRequest


def check_render_chat(request: RenderChatRequest) -> CheckedChat:
    """Validate RenderChat. Raises ServiceError (INVALID_ARGUMENT)."""
    found = Violations()
    found.require_known(request)
    chat = check_chat(request.chat, found)
    found.raise_if_any()
    return chat


def check_tokenize(request: TokenizeRequest) -> None:
    """Validate Tokenize. Raises ServiceError (INVALID_ARGUMENT), also for a text over `Limits.prompt_text_bytes`."""
    found = Violations()
    found.require_known(request)
    check_text_bytes(request.text, found)
    found.raise_if_any()


def check_detokenize(request: DetokenizeRequest, vocab_size: int) -> None:
    """Validate Detokenize. Raises ServiceError (INVALID_ARGUMENT), also for too many ids or an id out of range."""
    found = Violations()
    found.require_known(request)
    found.require_ids(request.token_ids, LIMITS.detokenize_ids, vocab_size, "token_ids")
    found.raise_if_any()


def check_text_bytes(text: str, found: Violations) -> None:
    limit = LIMITS.prompt_text_bytes
    found.require(len(text.encode()) <= limit, "text", f"must be at most {limit} bytes of UTF-8")
