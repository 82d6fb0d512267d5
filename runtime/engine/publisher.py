"""Sends commits to the front ends, as columns, one message for each launch and front end, and changes of the prefix
cache to the front ends that follow it.

A follower asks and is answered when something has changed, with a bounded number of changes. So the engine keeps only a
bounded record, which all followers share, and records nothing without followers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.engine.figures import Latencies
from runahead.runtime.engine.links import Links
from runahead.runtime.engine.live_requests import Registry, Tracked, WaitTimes
from runahead.runtime.memory.block_changes import BlockChanges
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.scheduler.drafts import tokens_per_launch
from runahead.runtime.scheduler.holdings import Holdings
from runahead.runtime.scheduler.outcomes import Commit, Ending, PromptLogprobRange
from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.kv_events import KvChange, KvReply
from runahead.runtime.wire.prompts import Content

NOT_SEEN_S: Final = -1.0  # the time of a stage that a request did not reach
_NO_HANDLES: Final = np.zeros(0, np.int64)

RECORDED: Final = 1 << 16  # changes that a front end may be behind
_MOST_CHANGES: Final = 512  # changes in a reply, and blocks scanned for one


class Addressed(NamedTuple):
    """A commit's tokens by front end. Commits with the same column of handles share it.

    handles: [n] the column. recipients: (front end, indexes of its tokens, their handles as bytes). want_logprobs: some
    requests want log-probabilities.
    """

    handles: NDArray[np.int64]
    recipients: tuple[tuple[int, NDArray[np.intp] | slice, bytes], ...]
    want_logprobs: bool


class Publisher:
    """Sends committed tokens at once, without blocking. It does not change the live requests."""

    def __init__(self, links: Links, holdings: Holdings, rings: RingMemory, registry: Registry) -> None:
        self._links = links
        self._rows = holdings.rows
        self._rings = rings
        layout = rings.layout
        cells = layout.rows * (1 + layout.drafts)
        # Indexed by cell, as in `Commit`.
        self._logprob = rings.logprob.reshape(layout.slots, cells)
        self._top_ids = rings.top_ids.reshape(layout.slots, cells, layout.max_top)
        self._top_logprobs = rings.top_logprobs.reshape(layout.slots, cells, layout.max_top)
        self._registry = registry
        self.latencies = Latencies(holdings.token_times, layout.drafts)
        self.wait_times = WaitTimes()
        self._to = Addressed(_NO_HANDLES, (), False)  # for the newest commit

    def admitted(self, request: Request, now: float) -> None:
        """Report once that a launch with the request's row was enqueued."""
        tracked = self._registry.by_handle(request.owner, request.handle)
        assert tracked is not None
        if not tracked.admitted_at:
            tracked.admitted_at = now
            queue_s = now - tracked.submitted_at
            self.latencies.queue.add(queue_s)
            waited = self.wait_times.longest(tracked.waited_before, request.sampling.has_penalty, now)
            self._links.send(request.owner, m.Admitted(request.handle, request.cached_tokens, queue_s, *waited))

    def publish_prompt(self, ring_slot: int, prompt_range: PromptLogprobRange) -> None:
        """Send the log-probabilities of a prompt that a retired launch left in the result ring.

        Sends only what was not sent before: a chunk that is computed again after an eviction begins with sent ones.
        """
        request, rings = prompt_range.request, self._rings
        offset = request.next_prompt_logprob
        end = min(prompt_range.start + 1 + prompt_range.count, request.prompt.size)
        if end <= offset:
            return
        first = prompt_range.first_entry + offset - prompt_range.start - 1
        entries, top = slice(first, first + end - offset), request.sampling.prompt_logprobs
        self._links.send(
            request.owner,
            m.PromptLogprobs(
                request.handle,
                offset,
                rings.prompt_logprob[ring_slot, entries].tobytes(),
                rings.prompt_top_ids[ring_slot, entries, :top].tobytes(),
                rings.prompt_top_logprobs[ring_slot, entries, :top].tobytes(),
            ),
        )
        request.next_prompt_logprob = end

    def publish(self, commit: Commit, now: float) -> None:
        """Send a launch's tokens. now: seconds on the engine's clock."""
        firsts = commit.firsts.nonzero()[0].tolist()
        for i in firsts:
            tracked = self._registry.by_handle(int(commit.owners[i]), int(commit.handles[i]))
            assert tracked is not None
            tracked.first_token_at = now
            self.latencies.first_token.add(now - tracked.submitted_at)
        self.latencies.tokens(commit, bool(firsts), now)
        if commit.handles is not self._to.handles:
            self._to = self._addressed(commit)
        finished = [(ending.request.owner, self._finished(ending, now)) for ending in commit.endings]
        for owner, mine, handles in self._to.recipients:
            logprobs = self._logprobs(commit, mine) if self._to.want_logprobs else ()
            endings = tuple(end for of, end in finished if of == owner) if finished else ()
            self._links.send(owner, m.Output(commit.launch, handles, commit.tokens[mine].tobytes(), logprobs, endings))

    def _addressed(self, commit: Commit) -> Addressed:
        owners = {*commit.owners.tolist(), *(ending.request.owner for ending in commit.endings)}
        recipients: list[tuple[int, NDArray[np.intp] | slice, bytes]] = []
        for owner in sorted(owners):
            mine = slice(None) if len(owners) == 1 else (commit.owners == owner).nonzero()[0]
            recipients.append((owner, mine, commit.handles[mine].tobytes()))
        want_logprobs = bool(np.count_nonzero(self._rows.logprobs.take(commit.slots) >= 0))
        return Addressed(commit.handles, tuple(recipients), want_logprobs)

    def end(self, ending: Ending, now: float) -> None:
        """End the stream of a request that ended outside a commit."""
        finished = self._finished(ending, now)
        self._links.send(ending.request.owner, m.Output(0, b"", b"", (), (finished,)))

    def ended(self, tracked: Tracked, now: float) -> None:
        """Count the time of an ended request if it had a token."""
        if tracked.first_token_at:
            self.latencies.end_to_end.add(now - tracked.submitted_at)

    def _logprobs(self, commit: Commit, mine: NDArray[np.intp] | slice) -> tuple[m.Logprobs, ...]:
        asked = self._rows.logprobs[commit.slots[mine]]
        wanting = (asked >= 0).nonzero()[0].tolist()
        ring_slot, cells = self._rings.slot(commit.launch), commit.cells[mine]
        found: list[m.Logprobs] = []
        for index in wanting:
            cell, count = int(cells[index]), int(asked[index])
            found.append(
                m.Logprobs(
                    index,
                    float(self._logprob[ring_slot, cell]),
                    tuple(self._top_ids[ring_slot, cell, :count].tolist()),
                    tuple(self._top_logprobs[ring_slot, cell, :count].tolist()),
                )
            )
        return tuple(found)

    def _finished(self, ending: Ending, now: float) -> m.Finished:
        request = ending.request
        tracked = self._registry.by_handle(request.owner, request.handle)
        assert tracked is not None
        self.ended(tracked, now)
        submitted, admitted, first = tracked.submitted_at, tracked.admitted_at, tracked.first_token_at
        positions = np.count_nonzero(request.drafted)  # drafts are at the first positions
        return m.Finished(
            handle=request.handle,
            reason=int(ending.reason),
            stop_token_id=ending.stop_token_id,
            cached_tokens=request.cached_tokens,
            queue_s=admitted - submitted if admitted else NOT_SEEN_S,
            prefill_s=first - admitted if first else NOT_SEEN_S,
            first_token_s=first - submitted if first else NOT_SEEN_S,
            decode_s=now - first if first else NOT_SEEN_S,
            drafted=tuple(request.drafted[:positions].tolist()),
            accepted=tuple(request.accepted[:positions].tolist()),
            tokens_per_launch=tokens_per_launch(request.generated, int(request.accepted.sum())),
            evictions=request.evictions,
            pauses=request.pauses,
            chunks_deferred=request.chunks_deferred,
        )


@dataclass(slots=True)
class _Follower:
    """A follower. position: the next change; -1: it knows nothing yet. scanned: blocks and snapshots whose present
    contents it has been sent. call: the call that waits for an answer."""

    position: int = -1
    scanned: int = 0
    call: int | None = None


class KvFollowers:
    """Followers of the prefix cache. pools: KV blocks, and snapshots of states. recorded: changes that a follower may
    be behind."""

    def __init__(self, links: Links, pools: tuple[BlockPool, BlockPool], recorded: int = RECORDED) -> None:
        self._links = links
        self._pools = pools
        self._recorded = recorded
        self._changes = BlockChanges(recorded)
        self._followers: dict[int, _Follower] = {}  # by front end

    def ask(self, owner: int, call: int) -> None:
        """Record a front end's question. It follows from the first one on."""
        if not self._followers:
            self._changes = BlockChanges(self._recorded)
            for pool in self._pools:
                pool.changes = self._changes
        self._followers.setdefault(owner, _Follower()).call = call

    def lose(self, owner: int) -> None:
        """Forget a front end that is gone."""
        if self._followers.pop(owner, None) is not None and not self._followers:
            for pool in self._pools:
                pool.changes = None

    def answer(self) -> None:
        """Answer the waiting followers for which there is something new."""
        if not self._followers:
            return
        for owner, follower in self._followers.items():
            if follower.call is not None:
                self._answer(owner, follower, follower.call)
        self._changes.drop(min(follower.position for follower in self._followers.values()))

    @property
    def has_more(self) -> bool:
        """Return whether a waiting follower can be answered at once."""
        return any(
            follower.call is not None and (follower.position < self._changes.end or self._left(follower))
            for follower in self._followers.values()
        )

    def _answer(self, owner: int, follower: _Follower, call: int) -> None:
        new = self._changes.since(follower.position, _MOST_CHANGES)
        cleared = new is None
        if new is None:
            follower.position, follower.scanned, new = self._changes.end, 0, []
        follower.position += len(new)
        found = [_told(change.group, change.is_stored, change.content) for change in new]
        is_scanning = bool(self._left(follower))
        if follower.position == self._changes.end:  # the scan is as new as the changes
            found += self._scan(follower)
        if found or cleared or is_scanning:
            follower.call = None
            is_whole = follower.position == self._changes.end and not self._left(follower)
            self._links.send(owner, KvReply(call, cleared, is_whole, tuple(found)))

    def _left(self, follower: _Follower) -> int:
        """Return how many blocks and snapshots are still to be scanned."""
        return sum(pool.total for pool in self._pools) - follower.scanned

    def _scan(self, follower: _Follower) -> list[KvChange]:
        """Return some of the present contents."""
        before = 0
        for pool in self._pools:
            begin = follower.scanned - before
            if begin < pool.total:
                end = min(begin + _MOST_CHANGES, pool.total)
                follower.scanned += end - begin
                contents = pool.unsalted_contents(begin + 1, end + 1)  # block 0 is the null block
                return [_told(pool.group, True, content) for content in contents]
            before += pool.total
        return []


def _told(group: int, is_stored: bool, content: Content) -> KvChange:
    if not is_stored:
        return KvChange(False, bool(group), content.key)
    return KvChange(True, bool(group), content.key, content.before, b"" if group else content.tokens)
