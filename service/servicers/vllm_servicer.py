"""The facade `vllm.grpc.engine.VllmEngine`, for routers that support vLLM's engine. Needs the extra `vllm-facade`.

A thin layer over this service: its completions have the same checks, limits, rights, ids and figures. Other methods are
UNIMPLEMENTED.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import message_factory
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from runahead.service.calls.call import FACADE, StreamWriter, current_call
from runahead.service.completion.preparing import OpenCompletion
from runahead.service.contract.errors import Violation, invalid_argument, no_tokenizer
from runahead.service.contract.validation import check_known
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import StalledReaderError
from runahead.service.servicers.control_servicer import abort
from runahead.service.servicers.health import HealthServicer
from runahead.service.servicers.servicer import GenerationServicer
from runahead.service.servicers.vllm_kv_events import KvEventsServicer
from runahead.service.servicers.vllm_messages import (
    check_input_logprobs,
    chunk,
    complete,
    generate_request,
    input_logprobs,
    loads,
    model_info,
    named_as_there,
    output_logprobs,
    server_info,
    tokenizer_chunks,
)
from runahead.service.text.tokenizer import TextTokenizer
from runahead.v1 import AbortRequest, GenerateRequest, Token

_Context = grpc.aio.ServicerContext[Any, Any]


class VllmServicer:
    """Serves the facade.
    health, version: the server's. tokenizer: None for token ids only. stalled_s: see `StreamWriter`.
    kv_events: the caller may subscribe to KV events.
    """

    def __init__(
        self,
        service: GenerationServicer,
        engine: SocketEngineClient,
        health: HealthServicer,
        tokenizer: TextTokenizer | None,
        version: str,
        stalled_s: float,
        kv_events: bool = False,
    ) -> None:
        self._service = service
        self._engine = engine
        self._health = health
        self._tokenizer = None if tokenizer is None else list(tokenizer_chunks(tokenizer.archive()))
        self._version = version
        self._stalled_s = stalled_s
        self._kv_events = KvEventsServicer(service, engine, stalled_s) if kv_events else None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the supported methods."""
        served = {}
        for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods:
            serve = getattr(self, method.name, None)
            if serve is None or (method.name == "SubscribeKvEvents" and self._kv_events is None):
                continue
            kinds = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
            request, response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
            served[method.name] = kinds[method.server_streaming](serve, request.FromString, response.SerializeToString)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(FACADE.strip("/"), served)])

    async def Generate(self, request: Any, context: _Context) -> None:
        async with StreamWriter(context, self._stalled_s) as writer:
            with named_as_there():
                ours = generate_request(request, self._engine.info.context_length)
                streaming = self._stream(ours, bool(request.stream), context, writer)
                del request, ours  # the status of an unread stream may wait here for long
                await streaming

    async def _stream(
        self, request: GenerateRequest, is_streamed: bool, context: _Context, writer: StreamWriter
    ) -> None:
        top = request.output.logprobs if request.output.HasField("logprobs") else -1
        prompt_top = request.output.prompt_logprobs if request.output.HasField("prompt_logprobs") else -1
        async with self._service.completing(request, context) as opened:
            prompt_tokens = opened.accepted.prompt_tokens
            check_input_logprobs(prompt_tokens, prompt_top)
            await writer.begin(current_call().trace.headers)
            opened.interrupt_writes()
            prompts = {0: await _prompt(opened, prompt_top)}  # the prompt's data comes with completion 0
            ids: list[list[int]] = [[] for _ in range(opened.n)]
            kept: list[list[Token]] = [[] for _ in range(opened.n)]
            while (event := await opened.next_event()) is not None:
                if event.HasField("finished"):
                    index = event.finished.index
                    scored = None if is_streamed else output_logprobs(kept[index], top)
                    end = complete(ids[index], event.finished, scored, prompts.pop(index, None))
                    if not opened.is_over:
                        await writer.write(end)
                        continue
                    with suppress(StalledReaderError):  # the library has everything: nothing follows the end
                        await writer.write(end)
                    continue
                index, tokens = event.delta.index, event.delta.tokens
                ids[index].extend(token.id for token in tokens)
                if not is_streamed:
                    kept[index].extend(tokens if top >= 0 else ())
                elif tokens:
                    cached = opened.cached_tokens(index)
                    await writer.write(chunk(event.delta, prompt_tokens, cached, top, prompts.pop(index, None)))

    async def GetTokenizer(self, request: Any, context: _Context) -> None:
        check_known(request)
        if self._tokenizer is None:
            raise no_tokenizer()
        async with StreamWriter(context, self._stalled_s) as writer:
            await writer.begin(current_call().trace.headers)
            for part in self._tokenizer:
                await writer.write(part)

    async def SubscribeKvEvents(self, request: Any, context: _Context) -> None:
        assert self._kv_events is not None
        await self._kv_events.subscribe(request, context)

    async def Abort(self, request: Any, context: _Context) -> Any:
        check_known(request)
        await abort(self._engine, AbortRequest(request_ids=request.request_ids))
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: _Context) -> Any:
        check_known(request)
        is_ready = self._health.is_ready
        return pb.HealthCheckResponse(healthy=is_ready, message="ready" if is_ready else "not ready")

    async def GetModelInfo(self, request: Any, context: _Context) -> Any:
        check_known(request)
        return model_info(self._engine.info)

    async def GetServerInfo(self, request: Any, context: _Context) -> Any:
        check_known(request)
        return server_info(self._engine.info, await self._engine.stats())

    async def GetLoads(self, request: Any, context: _Context) -> Any:
        check_known(request)
        _check_loads(request)
        stats, queued_tokens = await self._engine.stats(), self._service.queued_tokens
        return loads(self._engine.info, stats, queued_tokens, self._version, request.include)


async def _prompt(opened: OpenCompletion, top: int) -> Any:
    """Return the prompt's log-probabilities if requested."""
    tokens = [token async for event in opened.prompt_events() for token in event.tokens]
    return input_logprobs(tokens, top) if top >= 0 else None


def _check_loads(request: Any) -> None:
    """Check GetLoads. Raises ServiceError (INVALID_ARGUMENT). Any `include` is valid, as a filter."""
    if request.dp_rank:
        raise invalid_argument([Violation("dp_rank", "dp_rank must be 0, the only rank there is, or unset")])
