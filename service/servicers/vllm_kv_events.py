"""`SubscribeKvEvents` of the facade: cached KV blocks and the engine's load, so that routers send a prompt to the
replica with its prefix.

A stream begins with a snapshot, or continues after a batch that is still kept. Without changes, a batch without events
reports the load once a second, which shows that the replica is alive.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import grpc
from smg_grpc_proto.generated import common_pb2

from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.messages import EngineInfo
from runahead.service.calls.admission import Watchers
from runahead.service.calls.call import StreamWriter, current_call
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.validation import check_known
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.kv_events.feed import KIND, MEDIUM, Batch, Event, KvReaders, Removed, Stored, runs, sliding_window
from runahead.service.servicers.servicer import GenerationServicer
from runahead.service.servicers.vllm_messages import loads

_LOAD_S: Final = 1.0  # between reports of the load
_RANK: Final = 0
_LOCATION: Final[dict[str, Any]] = {
    "tier": common_pb2.KV_CACHE_TIER_DEVICE,
    "medium": MEDIUM,
    "locality": common_pb2.KV_CACHE_LOCALITY_LOCAL,
    "group_idx": 0,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class KvEventsServicer:
    """Serves subscribers. stalled_s: see `StreamWriter`."""

    def __init__(self, service: GenerationServicer, engine: SocketEngineClient, stalled_s: float) -> None:
        self._service = service
        self._engine = engine
        self._stalled_s = stalled_s
        self._readers = KvReaders(engine)
        self._subscribers = Watchers(LIMITS.kv_subscribers, "SubscribeKvEvents")
        self._load: tuple[float, EngineStats] | None = None  # and its time, monotonic
        self._samples = itertools.count(1)

    async def subscribe(self, request: Any, context: _Context) -> None:
        """Write batches until the client disconnects. Ends by an exception only: ServiceError, EngineLostError or
        StalledReaderError.
        """
        check_known(request)
        async with StreamWriter(context, self._stalled_s) as writer:
            with self._subscribers.watching():
                await writer.begin(current_call().trace.headers)
                await self._write(request.start_sequence_number, writer)

    async def _write(self, read: int, writer: StreamWriter) -> None:
        """Write batches. read: the client's last batch number; 0 for none."""
        info, event_ids, told_at = self._engine.info, itertools.count(1), -_LOAD_S
        has_any = False
        while True:
            found = await self._readers.behind(read, _LOAD_S if has_any or read else None)
            for batch in found:
                message = batch_message(batch, info, event_ids)
                message.load.CopyFrom(await self._load_record(is_whole=not has_any))
                await writer.write(message)
                read, has_any = batch.number, True
            if asyncio.get_running_loop().time() - told_at >= _LOAD_S:
                told_at = asyncio.get_running_loop().time()
                load = await self._load_record(is_whole=True)
                load.load_only = True
                await writer.write(
                    common_pb2.KvEventBatch(sequence_number=read, timestamp=time.time(), dp_rank=_RANK, load=load)
                )

    async def _load_record(self, is_whole: bool) -> Any:
        """Return the load of now or of the last second. is_whole: with all fields; otherwise only the fields that
        routing needs. Raises EngineLostError.
        """
        now = asyncio.get_running_loop().time()
        if self._load is None or now - self._load[0] >= _LOAD_S / 2:
            self._load = now, await self._engine.stats()
        asked_at, stats = self._load
        age_ms = int(1000 * (asyncio.get_running_loop().time() - asked_at))
        return load_record(self._engine.info, stats, self._service.queued_tokens, next(self._samples), age_ms, is_whole)


def batch_message(batch: Batch, info: EngineInfo, event_ids: Iterator[int]) -> Any:
    """Convert a batch to `KvEventBatch`, without a load."""
    message = common_pb2.KvEventBatch(sequence_number=batch.number, timestamp=batch.taken_s, dp_rank=_RANK)
    if batch.parts:
        message.snapshot.index, message.snapshot.count = batch.part, batch.parts
        message.snapshot.blocks = batch.blocks
        message.snapshot.SetInParent()
    for run in runs(batch.events):
        event = _event(run, info)
        event.event_id = 0 if batch.parts else next(event_ids)
        message.events.append(event)
    return message


def load_record(
    info: EngineInfo, stats: EngineStats, queued_tokens: int, sample: int, age_ms: int, is_whole: bool
) -> Any:
    """Make `EngineLoad` with the numbers of GetLoads. sample: a counter. age_ms: of the figures."""
    (load,) = loads(info, stats, queued_tokens, "", ()).loads
    record = common_pb2.EngineLoad(
        running_requests=load.num_running_reqs,
        waiting_requests=load.num_waiting_reqs,
        waiting_uncached_tokens=load.num_waiting_uncached_tokens,
        token_usage=load.token_usage,
        active_token_usage=load.token_usage,
        max_running_requests=load.max_running_requests,
        age_ms=age_ms,
        sample=sample,
    )
    if is_whole:
        record.cache_hit_rate = load.cache_hit_rate
        record.num_used_tokens, record.max_total_num_tokens = load.num_used_tokens, load.max_total_num_tokens
        record.queues.waiting, record.queues.paused = stats.waiting, stats.paused
    return record


def block_hash(key: bytes) -> int:
    """Return the first 8 bytes of a block's key as int64."""
    return int.from_bytes(key[:8], "big", signed=True)


def _event(run: Sequence[Event], info: EngineInfo) -> Any:
    first = run[0]
    if isinstance(first, Stored):
        stored = common_pb2.KvBlocksStored(**_LOCATION, kv_cache_spec_kind=KIND)
        if first.parent is not None:
            stored.parent_block_hash = block_hash(first.parent)
        if (window := sliding_window(info)) is not None:
            stored.kv_cache_spec_sliding_window = window
        for block in run:
            assert isinstance(block, Stored)
            stored.blocks.add(
                block_hash=block_hash(block.key), token_ids=block.ids, block_size=info.block_size, cache_level=0
            )
        return common_pb2.KvCacheEvent(stored=stored)
    if isinstance(first, Removed):
        hashes = [block_hash(block.key) for block in run if isinstance(block, Removed)]
        return common_pb2.KvCacheEvent(
            removed=common_pb2.KvBlocksRemoved(block_hashes=hashes, cache_level=0, **_LOCATION)
        )
    return common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
