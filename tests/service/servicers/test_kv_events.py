"""What a router is told of the prefix cache by the facade: all of it, then what changes, and the load."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2

from runahead.runtime.wire.kv_events import KvChange
from runahead.runtime.wire.prompts import PrefixKeys
from runahead.service.contract.limits import LIMITS
from runahead.service.servicers.vllm_kv_events import block_hash
from tests.service.fake_engine import INFO, STATS, TIMEOUT_S
from tests.service.rpc_errors import code, failure, words
from tests.service.running_service import Service
from tests.service.vllm_calls import ALICE, OPS, bearer, served, stub


def chain(*tokens: int) -> list[KvChange]:
    """Blocks of a prompt from its beginning, each of one token again and again, that are stored."""
    keys = PrefixKeys("")
    contents = [
        keys.content(place, np.full(INFO.block_size, token, np.int32).tobytes()) for place, token in enumerate(tokens)
    ]
    return [KvChange(True, False, content.key, content.before, content.tokens) for content in contents]


def removed(change: KvChange) -> KvChange:
    return KvChange(False, False, change.key)


class Stream:
    """A subscriber, which reads on a thread of its own."""

    def __init__(self, service: Service, start: int = 0, metadata: Any = None) -> None:
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
        self.call = stub(service).SubscribeKvEvents(request, metadata=metadata)
        self._read: queue.Queue[Any] = queue.Queue()
        self.error: grpc.RpcError | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for message in self.call:
                self._read.put(message)
        except grpc.RpcError as error:
            self.error = error
        self._read.put(None)

    def next(self, load_only: bool = False) -> Any:
        """The next message that is, or is not, about the load alone."""
        while True:
            message = self._read.get(timeout=TIMEOUT_S)
            assert message is not None, self.error
            if message.load.load_only == load_only:
                return message

    def end(self) -> grpc.RpcError:
        while self._read.get(timeout=TIMEOUT_S) is not None:
            pass
        assert self.error is not None
        return self.error

    def cancel(self) -> None:
        self.call.cancel()
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with served(tmp_path, kv_events=True) as running:
        yield running


def test_a_stream_begins_with_everything_and_goes_on_with_what_changes(service: Service) -> None:
    first, second = chain(1, 2)
    stream = Stream(service)
    service.engine.kv_changes(first, cleared=True, is_whole=False)
    service.engine.kv_changes(second)
    snapshot = stream.next()
    assert (snapshot.snapshot.index, snapshot.snapshot.count, snapshot.snapshot.blocks) == (0, 1, 2)
    cleared, stored = snapshot.events
    assert cleared.HasField("cleared") and (cleared.event_id, stored.event_id) == (0, 0)
    assert [block.block_hash for block in stored.stored.blocks] == [block_hash(one.key) for one in (first, second)]
    assert [list(block.token_ids) for block in stored.stored.blocks] == [[1] * 16, [2] * 16]
    assert not stored.stored.HasField("parent_block_hash"), "it is a prompt's first"
    assert (stored.stored.group_idx, stored.stored.kv_cache_spec_kind, stored.stored.medium) == (
        0,
        "full_attention",
        "GPU",
    )
    assert (stored.stored.tier, stored.stored.locality) == (
        common_pb2.KV_CACHE_TIER_DEVICE,
        common_pb2.KV_CACHE_LOCALITY_LOCAL,
    )
    (third,) = chain(1, 3)[1:]
    service.engine.kv_changes(removed(second), third)
    batch = stream.next()
    assert batch.sequence_number == snapshot.sequence_number + 1 and not batch.HasField("snapshot")
    gone, added = batch.events
    assert list(gone.removed.block_hashes) == [block_hash(second.key)] and gone.event_id == 1
    assert added.stored.parent_block_hash == block_hash(first.key) and added.event_id == 2
    stream.cancel()


def test_a_subscriber_goes_on_behind_the_batch_that_it_has_read(service: Service) -> None:
    first, second = chain(1, 2)
    stream = Stream(service)
    service.engine.kv_changes(first, cleared=True)
    read = stream.next().sequence_number
    stream.cancel()
    service.engine.kv_changes(second)
    again = Stream(service, read)
    batch = again.next()
    assert batch.sequence_number == read + 1 and not batch.HasField("snapshot")
    assert [block.block_hash for block in batch.events[0].stored.blocks] == [block_hash(second.key)]
    again.cancel()
    other = Stream(service, read + 5)
    assert other.next().snapshot.blocks == 2, "a number that was never given is not gone on behind"
    other.cancel()


def test_a_subscriber_that_has_read_everything_hears_of_the_load(service: Service) -> None:
    stream = Stream(service)
    service.engine.kv_changes(*chain(1, 1), cleared=True)
    read = stream.next().sequence_number
    stream.cancel()
    again = Stream(service, read)
    assert again.next(load_only=True).sequence_number == read
    again.cancel()


def test_what_the_engine_has_lost_is_cleared_and_told_again(service: Service) -> None:
    first, second = chain(1, 2)
    stream = Stream(service)
    service.engine.kv_changes(first, second, cleared=True)
    stream.next()
    service.engine.kv_changes(first, cleared=True)
    cleared, stored = stream.next().events
    assert cleared.HasField("cleared")
    assert [block.block_hash for block in stored.stored.blocks] == [block_hash(first.key)]
    stream.cancel()


def test_the_load_comes_with_each_batch_and_by_itself(service: Service) -> None:
    stream = Stream(service)
    service.engine.kv_changes(cleared=True)
    snapshot = stream.next()
    load = snapshot.load
    assert (load.running_requests, load.waiting_requests) == (STATS.running, STATS.waiting)
    assert load.token_usage == load.active_token_usage == 23 / 63 and load.max_running_requests == INFO.max_rows
    assert load.cache_hit_rate == 0.75 and load.max_total_num_tokens == 63 * 16 and load.queues.paused == STATS.paused
    samples = [load.sample]
    for _ in range(2):
        alone = stream.next(load_only=True)
        assert not alone.events and alone.sequence_number == snapshot.sequence_number
        samples.append(alone.load.sample)
    assert samples == sorted(set(samples))
    stream.cancel()


def test_the_first_message_is_none_about_the_load_alone(service: Service) -> None:
    stream = Stream(service)
    service.engine.kv_changes(cleared=True)
    message = stream._read.get(timeout=TIMEOUT_S)
    assert message.HasField("snapshot") and not message.load.load_only
    stream.cancel()


def test_the_call_that_smg_makes_is_answered_with_a_batch_first(service: Service) -> None:
    recorded = json.loads((Path(__file__).parents[1] / "router_calls.json").read_text())
    (request,) = (bytes.fromhex(call["request"]) for call in recorded if call["method"] == "SubscribeKvEvents")
    call: Any = service.channel.unary_stream("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents")
    answers = call(request, timeout=TIMEOUT_S)
    service.engine.kv_changes(*chain(1), cleared=True)
    assert common_pb2.KvEventBatch.FromString(next(answers)).snapshot.blocks == 1
    answers.cancel()


def test_it_needs_the_right_control(tmp_path: Path) -> None:
    callers = f"alice generate token {ALICE}\nops control token {OPS}\n"
    with served(tmp_path, callers, kv_events=True) as service:
        assert code(Stream(service, metadata=bearer(ALICE)).end()) == grpc.StatusCode.PERMISSION_DENIED
        stream = Stream(service, metadata=bearer(OPS))
        service.engine.kv_changes(cleared=True)
        assert stream.next().HasField("snapshot")
        stream.cancel()


def test_without_the_setting_it_is_not_there_whatever_the_right(tmp_path: Path) -> None:
    with served(tmp_path, f"ops control token {OPS}\n") as service:
        assert code(Stream(service, metadata=bearer(OPS)).end()) == grpc.StatusCode.UNIMPLEMENTED


def test_a_field_that_is_not_known_is_refused(service: Service) -> None:
    call: Any = service.channel.unary_stream("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents")
    error = failure(lambda: list(call(b"\x50\x01", timeout=TIMEOUT_S)))
    assert code(error) == grpc.StatusCode.INVALID_ARGUMENT


def test_there_is_room_for_some_subscribers(service: Service) -> None:
    streams = [Stream(service) for _ in range(LIMITS.kv_subscribers)]
    service.engine.kv_changes(*chain(1), cleared=True)
    for stream in streams:
        assert stream.next().snapshot.blocks == 1
    refused = Stream(service).end()
    assert code(refused) == grpc.StatusCode.RESOURCE_EXHAUSTED and "SubscribeKvEvents" in words(refused)
    streams.pop().cancel()
    again = Stream(service)
    while again._read.get(timeout=TIMEOUT_S) is None:  # the place is free once the server has seen the end
        again = Stream(service)
    for stream in (*streams, again):
        stream.cancel()


def test_subscribers_end_with_the_engine(service: Service) -> None:
    stream = Stream(service)
    service.engine.kv_changes(cleared=True)
    stream.next()
    service.engine.die()
    assert code(stream.end()) == grpc.StatusCode.UNAVAILABLE
    assert code(Stream(service).end()) == grpc.StatusCode.UNAVAILABLE


def test_subscribers_end_with_the_service(service: Service) -> None:
    stream = Stream(service)
    service.engine.kv_changes(cleared=True)
    stream.next()
    service.stop(0.0)
    error = stream.end()
    assert code(error) == grpc.StatusCode.UNAVAILABLE and "shutting down" in words(error)
