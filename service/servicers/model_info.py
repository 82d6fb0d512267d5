"""What `GetModelInfo` answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runahead.runtime.wire import messages as m
from runahead.runtime.wire import prompt_launches
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import most_completions
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.structures.structures import why_none
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import (
    EngineConfiguration,
    Exactness,
    Experts,
    GetModelInfoResponse,
    LayerKind,
    Limits,
    PromptLaunches,
    SpecialToken,
    WeightFormat,
)


def model_info(
    info: m.EngineInfo,
    server_id: str,
    tokenizer: TextTokenizer | None,
    settings: FrontEndSettings,
    chat_ends: Sequence[int] | None,
) -> GetModelInfoResponse:
    """The served model, its tokenizer's special tokens and template, and the limits; without a tokenizer, those about
    text are 0. chat_ends: tokens that end an answer to a chat; None: there are no chats."""
    specials = () if tokenizer is None else tokenizer.special_tokens
    structures = tokenizer is not None and not why_none(info)
    return GetModelInfoResponse(
        model=info.model,
        architecture=info.architecture,
        parameters=info.parameters,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id if info.bos_token_id >= 0 else None,
        special_tokens=[SpecialToken(id=special.token_id, content=special.content) for special in specials],
        chat_template=None if tokenizer is None else tokenizer.chat_templates.get("default"),
        has_tokenizer=tokenizer is not None,
        template_tokens=None if tokenizer is None else tokenizer.template_tokens,
        limits=_limits(info, settings, has_text=tokenizer is not None, structures=structures),
        engine=EngineConfiguration(
            device=info.device,
            dtype=info.dtype,
            run_ahead=info.run_ahead,
            max_rows=info.max_rows,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            penalty_slots=info.penalty_slots,
            prefix_cache=info.prefix_cache,
            exactness=Exactness(**msgspec.structs.asdict(info.exactness)),
            structures=structures,
            row_state_bytes=info.state_bytes,
            drafter=info.drafter,
            draft_parameters=info.draft_parameters,
            prompt_launches=_prompt_launches(info.prompt_launches),
            state_snapshots=info.snapshots,
            state_snapshot_blocks=info.snapshot_blocks,
            tensor_parallel=info.tensor_parallel,
        ),
        server_id=server_id,
        layers=[_layer_kind(kind) for kind in info.layers],
        drafters=info.drafters,
        chat=chat_ends is not None,
        chat_end_token_ids=chat_ends,
        weights=[WeightFormat(**msgspec.structs.asdict(weights)) for weights in info.weights],
    )


def _limits(info: m.EngineInfo, settings: FrontEndSettings, *, has_text: bool, structures: bool) -> Limits:
    """has_text: there is a tokenizer. structures: requests may have one."""
    stops, text_bytes, stop_bytes = LIMITS.stop_strings, LIMITS.prompt_text_bytes, LIMITS.stop_string_bytes
    if not has_text:
        stops = text_bytes = stop_bytes = 0
    return Limits(
        prompt_tokens=info.context_length - 1,
        prompt_text_bytes=text_bytes,
        max_tokens=LIMITS.max_tokens,
        top_logprobs=LIMITS.top_logprobs,
        stop_strings=stops,
        stop_string_bytes=stop_bytes,
        stop_token_ids=LIMITS.stop_token_ids,
        logit_bias_entries=LIMITS.logit_bias_entries,
        request_id_length=LIMITS.request_id_length,
        abort_ids=LIMITS.abort_ids,
        message_bytes=settings.max_request_bytes,
        streams=settings.max_streams,
        unread_bytes=LIMITS.unread_bytes,
        queue=info.max_queue,
        unread_prompt_bytes=LIMITS.unread_prompt_bytes,
        once_prompt_bytes=LIMITS.once_prompt_bytes,
        structure_bytes=LIMITS.structure_bytes if structures else 0,
        completions=most_completions(info),
    )


def _prompt_launches(launches: prompt_launches.PromptLaunches) -> PromptLaunches:
    return PromptLaunches(
        chunk_tokens=launches.chunk,
        launch_tokens=launches.launch,
        queued_tokens=launches.queued,
        why=launches.why,
        mixed_tokens=launches.mixed,
    )


def _layer_kind(kind: m.LayerKind) -> LayerKind:
    experts = kind.experts
    return LayerKind(
        count=kind.count,
        mixer=kind.mixer,
        window=kind.window,
        feed_forward=kind.feed_forward,
        experts=None
        if experts is None
        else Experts(count=experts.count, per_token=experts.per_token, shared=experts.shared),
    )
