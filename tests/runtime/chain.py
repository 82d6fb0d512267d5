"""A whole engine in one process, on the simulated device with the hash model: what the tests of the chain drive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cuda_graphs.rings import RingLayout, allocate_rings
from cuda_graphs.simulated_device import Schedule, SimulatedDevice, at_once
from runtime import messages as m
from runtime.block_pool import BlockPool
from runtime.engine import Engine
from runtime.hash_program import HashProgram
from runtime.ledger import Ledger
from runtime.plan import PLAN_WORDS
from runtime.poison import RingPoison
from runtime.request import MAX_STOP_IDS, SamplingParams, StoppingParams
from runtime.rows import Rows
from runtime.scheduler import Release, Scheduler, SchedulerLimits

VOCAB = 97
EOS = 1


@dataclass
class MemoryLinks:
    """Front ends as two lists."""

    inbox: list[tuple[int, m.ToEngine | None]] = field(default_factory=list)
    sent: list[tuple[int, m.ToFrontEnd]] = field(default_factory=list)

    def receive(self) -> Sequence[tuple[int, m.ToEngine | None]]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        self.sent.append((owner, message))

    def wake_fds(self) -> Sequence[int]:
        return ()

    def wait(self, timeout_s: float) -> None:
        pass


@dataclass
class Chain:
    """An engine and what it was told and said."""

    engine: Engine
    device: SimulatedDevice
    links: MemoryLinks

    def submit(
        self,
        handle: int,
        prompt: Sequence[int],
        *,
        seed: int = 0,
        request_id: str = "",
        priority: int = 0,
        **stopping: object,
    ) -> None:
        self.links.inbox.append(
            (
                1,
                m.Submit(
                    handle,
                    request_id or f"r{handle}",
                    np.asarray(prompt, np.int32).tobytes(),
                    SamplingParams(seed=seed),
                    StoppingParams(**stopping),  # type: ignore[arg-type]
                    priority,
                ),
            )
        )

    def tell(self, message: m.ToEngine | None) -> None:
        self.links.inbox.append((1, message))

    def turn(self) -> None:
        """One turn of the loop, and every invariant after it."""
        self.engine.turn()
        self.check()

    def check(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.pool.check()
        scheduler.rows.check()
        owned = [block for request in scheduler.by_slot if request for block in request.blocks]
        assert len(owned) == len(set(owned)) == scheduler.pool.owned

    def run(self, limit: int = 10_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(limit):
            self.turn()
            if not self.links.inbox and not len(self.engine.registry) and not self.engine.ledger.in_flight:
                if not self.engine.ledger.owes_a_launch:
                    return
        raise AssertionError(f"no end after {limit} turns")

    def tokens(self) -> dict[int, list[int]]:
        """Tokens by handle, in the order in which they came."""
        found: dict[int, list[int]] = defaultdict(list)
        for _, message in self.links.sent:
            if isinstance(message, m.Output):
                handles = np.frombuffer(message.handles, np.int32).tolist()
                for handle, token in zip(handles, np.frombuffer(message.tokens, np.int32).tolist(), strict=True):
                    found[handle].append(token)
        return dict(found)

    def finished(self) -> dict[int, list[m.Finished]]:
        """Terminals by handle: exactly one each, if all is well."""
        found: dict[int, list[m.Finished]] = defaultdict(list)
        for _, message in self.links.sent:
            if isinstance(message, m.Output):
                for end in message.finished:
                    found[end.handle].append(end)
        return dict(found)


def make_chain(
    run_ahead: int = 2,
    *,
    schedule: Schedule = at_once,
    max_rows: int = 8,
    num_blocks: int = 65,
    block_size: int = 8,
    context_length: int = 128,
    prefill_chunk: int = 16,
    max_prefill_tokens: int = 32,
    run_ahead_tokens: int = 512,
    max_queue: int = 100,
    eos: tuple[int, ...] = (EOS,),
    clock: Callable[[], float] | None = None,
) -> Chain:
    """A chain of the given depth; 0 is serial."""
    layout = RingLayout(run_ahead + 2, PLAN_WORDS, 4096, max_rows, 4)
    rings = allocate_rings(layout)
    program = HashProgram(
        rings,
        max_rows=max_rows,
        num_blocks=num_blocks,
        block_size=block_size,
        context_length=context_length,
        vocab_size=VOCAB,
    )
    device = SimulatedDevice(program, rings, schedule)
    limits = SchedulerLimits(context_length, VOCAB, eos, prefill_chunk, max_prefill_tokens, PLAN_WORDS, 4096)
    ledger: Ledger[Release] = Ledger(run_ahead, run_ahead_tokens)
    scheduler = Scheduler(limits, Rows(max_rows, MAX_STOP_IDS), BlockPool(num_blocks, block_size), ledger)
    links = MemoryLinks()
    options = {} if clock is None else {"clock": clock}
    engine = Engine(device, scheduler, links, max_queue=max_queue, poison=RingPoison(program, rings), **options)
    return Chain(engine, device, links)
