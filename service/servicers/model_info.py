"""Answers `GetModelInfo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message

from runahead.runtime.wire import messages as m
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import most_completions
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.structures.structures import why_none
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import (
    EngineConfiguration,
    Exactness,
    GetModelInfoResponse,
    LayerKind,
    Limits,
    PromptLaunches,
    SpecialToken,
    WeightFormat,
)

M = TypeVar("M", bound=Message)


def model_info(
    info: m.EngineInfo,
    server_id: str,
    tokenizer: TextTokenizer | None,
    settings: FrontEndSettings,
    chat_ends: Sequence[int] | None,
) -> GetModelInfoResponse:
    """Describe the model, its tokenizer's special tokens and template, and the limits; text limits are 0 without a
    tokenizer. chat_ends: tokens that end a chat's answer; None without chats.
    """
    specials = {} if tokenizer is None else tokenizer.special_tokens
    structures = tokenizer is not None and not why_none(info)
    launches = info.prompt_launches
    return _same_fields(
        GetModelInfoResponse,
        info,
        bos_token_id=info.bos_token_id if info.bos_token_id >= 0 else None,
        special_tokens=[SpecialToken(id=at, content=content) for at, content in specials.items()],
        chat_template=None if tokenizer is None else tokenizer.chat_templates.get("default"),
        has_tokenizer=tokenizer is not None,
        template_tokens=None if tokenizer is None else tokenizer.template_tokens,
        limits=_limits(info, settings, has_text=tokenizer is not None, structures=structures),
        engine=_same_fields(
            EngineConfiguration,
            info,
            exactness=Exactness(**msgspec.to_builtins(info.exactness)),
            structures=structures,
            row_state_bytes=info.state_bytes,
            prompt_launches=PromptLaunches(
                chunk_tokens=launches.chunk,
                launch_tokens=launches.launch,
                queued_tokens=launches.queued,
                why=launches.why,
                mixed_tokens=launches.mixed,
            ),
            state_snapshots=info.snapshots,
            state_snapshot_blocks=info.snapshot_blocks,
        ),
        server_id=server_id,
        layers=[LayerKind(**msgspec.to_builtins(kind)) for kind in info.layers],
        chat=chat_ends is not None,
        chat_end_token_ids=chat_ends,
        weights=[WeightFormat(**msgspec.to_builtins(weights)) for weights in info.weights],
    )


def _limits(info: m.EngineInfo, settings: FrontEndSettings, *, has_text: bool, structures: bool) -> Limits:
    """Return the limits. has_text: there is a tokenizer. structures: requests may have one."""
    about_text = ("stop_strings", "prompt_text_bytes", "stop_string_bytes") if not has_text else ()
    about_structures = ("structure_bytes",) if not structures else ()
    return _same_fields(
        Limits,
        LIMITS,
        prompt_tokens=info.context_length - 1,
        message_bytes=settings.max_request_bytes,
        streams=settings.max_streams,
        queue=info.max_queue,
        completions=most_completions(info),
        **dict.fromkeys((*about_text, *about_structures), 0),
    )


def _same_fields(message: type[M], source: object, **others: Any) -> M:
    """Make a message from the source's attributes of the same names, and further values."""
    fields: Any = message.DESCRIPTOR.fields_by_name  # its class depends on protobuf's implementation
    same = {name: getattr(source, name) for name in fields if name not in others and hasattr(source, name)}
    return message(**same, **others)
