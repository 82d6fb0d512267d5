"""OpenTelemetry spans of completions, sent to a collector. Needs the extra `otel`.

A completion is a span below the caller's, with up to three children: `queue`, `prefill` and `decode`. They are made
when the call has ended, so a running call costs nothing. A thread of the library sends them from a bounded queue, and
drops and logs the excess: a slow or lost collector costs spans and never delays a stream.

Attributes follow OpenTelemetry's conventions for generative AI and RPC, and hold no text of a request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from runahead.service.calls.call import COMPLETIONS, SAMPLED, Call, finish_of

_OPERATION: Final = "text_completion"
_QUEUE: Final = 4096  # waiting spans
_BATCH: Final = 64  # spans serialized at once: a few milliseconds with the GIL
_DELAY_MS: Final = 1000  # maximum delay of a span
_EXPORT_S: Final = 5.0  # for one message with its retries
_CLOSE_S: Final = 1.0  # for the remaining spans when the process ends
_OK: Final = "OK"

log = structlog.get_logger(__name__)


class _Counted(SpanExporter):
    """An exporter that counts and logs its failures. One thread at a time exports."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._dropped = 0  # spans so far

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._dropped += len(spans)
                log.warning("spans_not_sent", spans=len(spans), dropped=self._dropped)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Spans:
    """Sends spans.
    endpoint: an OTLP collector over gRPC, http:// in plain text or https://. model: the served model.
    version: the server's.
    """

    def __init__(self, endpoint: str, model: str, version: str) -> None:
        self._model = model
        self._resource = Resource.create({"service.name": "runahead", "service.version": version})
        self._scope = InstrumentationScope("runahead", version)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._processor = BatchSpanProcessor(
            _Counted(exporter),
            max_queue_size=_QUEUE,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=_BATCH,
        )

    def ended(self, call: Call) -> None:
        """Queue a completion's spans if its trace is sampled."""
        if call.method not in COMPLETIONS or not call.trace.flags & SAMPLED:
            return
        for span in self._spans(call):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send the remaining spans for at most one second."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _spans(self, call: Call) -> Iterator[ReadableSpan]:
        """Yield the completion's span, then its children, of which each begins at the previous one's end."""
        trace = call.trace
        own = _context(trace.trace_id, trace.span_id)
        parent = _context(trace.trace_id, trace.parent_id, is_remote=True) if trace.parent_id else None
        end_ns = _wall_ns(call, call.ended or call.began)
        is_failed = call.code.name != _OK
        yield ReadableSpan(
            name=f"{_OPERATION} {self._model}",
            context=own,
            parent=parent,
            resource=self._resource,
            attributes=self._attributes(call),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, call.reason or call.code.name) if is_failed else Status(),
            start_time=call.began_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )
        for index, (name, begin, end) in enumerate(_parts(call, end_ns)):
            yield ReadableSpan(
                name=name,
                context=_context(trace.trace_id, f"{int(trace.span_id, 16) ^ (index + 1):016x}"),
                parent=own,
                resource=self._resource,
                kind=SpanKind.INTERNAL,
                start_time=begin,
                end_time=end,
                instrumentation_scope=self._scope,
            )

    def _attributes(self, call: Call) -> Mapping[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.provider.name": "runahead",
            "gen_ai.request.model": self._model,
            "rpc.system.name": "grpc",
            "rpc.method": call.method.strip("/"),
            "rpc.response.status_code": call.code.name,
        }
        if call.code.name != _OK:
            attributes["error.type"] = call.reason or call.code.name
        if call.request_id:
            attributes["gen_ai.response.id"] = call.request_id
        if call.prompt_tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = call.prompt_tokens
        if call.so_far is not None:
            usage = call.so_far.usage
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        if finish := finish_of(call):
            attributes["gen_ai.response.finish_reasons"] = (finish.lower(),)
        return attributes


def _parts(call: Call, end_ns: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, begin and end of the completion's phases; the last one ends with the call."""
    if call.submitted is None or call.so_far is None:
        return
    timing, submitted_ns = call.so_far.timing, _wall_ns(call, call.submitted)
    if not timing.HasField("queue"):
        yield "queue", submitted_ns, end_ns
        return
    admitted_ns = submitted_ns + timing.queue.ToNanoseconds()
    yield "queue", submitted_ns, admitted_ns
    if not timing.HasField("first_token"):
        yield "prefill", admitted_ns, max(admitted_ns, end_ns)
        return
    first_ns = submitted_ns + timing.first_token.ToNanoseconds()
    yield "prefill", admitted_ns, max(admitted_ns, first_ns)
    if timing.HasField("decode"):
        yield "decode", first_ns, first_ns + timing.decode.ToNanoseconds()


def _wall_ns(call: Call, monotonic_s: float) -> int:
    return call.began_ns + round((monotonic_s - call.began) * 1e9)


def _context(trace_id: str, span_id: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
