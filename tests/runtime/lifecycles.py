"""A random life of an engine: two front ends that ask, abort, cancel and go, and drains in between, all from a seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.cuda_graphs.simulated_device import at_once, seeded_schedule
from tests.runtime.chain import Chain, make_chain, tightest_plan
from tests.runtime.programs.hash_model import EOS, VOCAB, completion

OWNERS = (1, 2)
Key = tuple[int, int]  # front end, handle


@dataclass(frozen=True)
class Asked:
    """One request as its front end sent it."""

    prompt: list[int]
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]

    def completion(self, context_length: int) -> list[int]:
        stops = {EOS, *self.stop_token_ids}
        return completion(
            self.prompt,
            self.seed,
            self.max_tokens,
            stops=stops,
            min_tokens=self.min_tokens,
            context_length=context_length,
        )


def random_chain(seed: int, dice: random.Random) -> Chain:
    """Any depth; often one row, or blocks for hardly more than one request."""
    block_size = dice.choice((8, 16))
    prefill_chunk = block_size * dice.choice((1, 2, 4))
    context_length = dice.choice((32, 64, 128))
    blocks = context_length // block_size
    max_rows = dice.choice((1, 1, 2, 3, 5, 8))
    return make_chain(
        dice.randint(0, 4),
        schedule=seeded_schedule(seed) if dice.random() < 0.8 else at_once,
        max_rows=max_rows,
        num_blocks=1 + dice.choice((2, blocks, blocks + 1, 40)),
        block_size=block_size,
        context_length=context_length,
        prefill_chunk=prefill_chunk,
        max_prefill_tokens=prefill_chunk * dice.choice((1, 2)) + dice.choice((0, 3)),
        run_ahead_tokens=dice.choice((1, 5, 20, 512)),
        max_queue=dice.choice((3, 100)),
        plan_words=dice.choice((PLAN_WORDS, PLAN_WORDS, tightest_plan(max_rows, prefill_chunk, block_size))),
    )


class Lifecycle:
    """events: how often each kind of thing happened. dropped: requests whose end nobody was told."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.chain = random_chain(seed, self.dice)
        self.context_length = self.chain.engine.scheduler.limits.context_length
        self.asked: dict[Key, Asked] = {}
        self.events: Counter[str] = Counter()
        self.dropped: set[Key] = set()

    def live(self) -> None:
        """From the first request until nothing is left to do."""
        dice = self.dice
        for handle in range(1, dice.randint(3, 25)):
            self._ask(dice.choice(OWNERS), handle)
            for _ in range(dice.randint(0, 2)):
                if dice.random() < 0.4:
                    self._interrupt(self._victim())
            if dice.random() < 0.06:
                self._lose(2)
            if dice.random() < 0.02:
                self.events["abort all"] += 1
                self.chain.tell(m.Abort(9, (), True))
            for _ in range(dice.randint(0, 5)):
                self.chain.turn()
            if dice.random() < 0.2:
                self._drain()
        self.chain.run()
        self._drain()

    def _ask(self, owner: int, handle: int) -> None:
        dice, chunk = self.dice, self.chain.engine.scheduler.limits.prefill_chunk
        longest = self.context_length - 1
        count = min(longest, dice.choice((1, chunk, 2 * chunk, longest, dice.randint(1, longest))))
        max_tokens = dice.choice((1, 1, 2, dice.randint(1, 40)))
        asked = self.asked[owner, handle] = Asked(
            prompt=[dice.randrange(2, VOCAB) for _ in range(count)],
            seed=dice.getrandbits(63),
            max_tokens=max_tokens,
            min_tokens=dice.choice((0, 0, min(max_tokens, 3))),
            stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice((0, 0, 5)))),
        )
        self.chain.submit(
            handle,
            asked.prompt,
            owner=owner,
            seed=asked.seed,
            request_id=f"{owner}-{handle}",
            max_tokens=asked.max_tokens,
            min_tokens=asked.min_tokens,
            stop_token_ids=asked.stop_token_ids,
        )

    def _victim(self) -> Key:
        """Mostly one that has a row."""
        running = [key for key in self.asked if self.phase_of(key) in ("prefill", "decode")]
        return self.dice.choice(running if running and self.dice.random() < 0.6 else list(self.asked)[-5:])

    def _interrupt(self, key: Key) -> None:
        """Cancel a request, or abort it, from whichever front end, in whatever phase it is."""
        owner, handle = key
        if self.dice.random() < 0.5:
            self.events[f"cancel {self.phase_of(key)}"] += 1
            if self.phase_of(key) != "finished":
                self.dropped.add(key)
            self.chain.tell(m.Cancel(handle), owner=owner)
        else:
            self.events[f"abort {self.phase_of(key)}"] += 1
            self.chain.tell(m.Abort(1, (f"{owner}-{handle}",)), owner=self.dice.choice(OWNERS))

    def _lose(self, owner: int) -> None:
        for key in [key for key in self.asked if key[0] == owner and self.phase_of(key) != "finished"]:
            self.events[f"lost {self.phase_of(key)}"] += 1
            self.dropped.add(key)
        self.chain.tell(None, owner=owner)

    def phase_of(self, key: Key) -> str:
        """What a message that is sent now will find: it is read before the loop does anything else."""
        registry, rows = self.chain.engine.registry, self.chain.engine.scheduler.rows
        tracked = registry.by_handle(*key)
        if tracked is None and registry.has_finished(f"{key[0]}-{key[1]}"):
            return "finished"
        if tracked is None:
            arriving = {(owner, sent.handle) for owner, sent in self.chain.links.unread if isinstance(sent, m.Submit)}
            return "on its way" if key in arriving else "refused"
        if tracked.request.row_slot == NO_SLOT:
            return "waiting"
        return RowPhase(int(rows.phase[tracked.request.row_slot])).name.lower()

    def _drain(self) -> None:
        """Drain, which compares the device's rows with the host's."""
        self.chain.engine.drain("test")
        self.chain.check()
        assert not self.chain.ledger.in_flight
        for request in self.chain.engine.scheduler.holdings.by_slot:
            if request is not None:
                phase = RowPhase(int(self.chain.engine.scheduler.rows.phase[request.row_slot]))
                self.events[f"row compared in {phase.name.lower()}"] += 1

    # ------------------------------------------------------------ what came of it

    def check_answers(self) -> None:
        """Exact tokens; one terminal each but for those that nobody listened to; no terminal without its reason."""
        for owner in OWNERS:
            tokens, finished = self.chain.tokens(owner), self.chain.finished(owner)
            refused = {refusal.handle: refusal.code for refusal in self.chain.refused(owner)}
            self.events.update(f"refused {code}" for code in refused.values())
            for key, asked in self.asked.items():
                if key[0] == owner:
                    handle = key[1]
                    ends = finished.get(handle, [])
                    self._check_answer(key, asked, tokens.get(handle, []), ends, handle in refused)

    def _check_answer(self, key: Key, asked: Asked, got: list[int], ends: list[m.Finished], refused: bool) -> None:
        expected = asked.completion(self.context_length)
        if refused:
            assert not got and not ends, f"{key} was refused and answered"
        elif not ends:
            assert key in self.dropped, f"{key} has no terminal"
            assert got == expected[: len(got)]
        else:
            (end,) = ends
            reason = FinishReason(end.reason)
            self.events[f"ended {reason.name}"] += 1
            if reason == FinishReason.ABORTED:
                assert got == expected[: len(got)]
            else:
                assert got == expected
                assert reason == self._reason(asked, expected)

    def _reason(self, asked: Asked, expected: list[int]) -> FinishReason:
        if expected[-1] == EOS:
            return FinishReason.END_OF_SEQUENCE
        if expected[-1] in asked.stop_token_ids:
            return FinishReason.STOP
        limited = len(asked.prompt) + asked.max_tokens > self.context_length
        return FinishReason.CONTEXT_LENGTH if limited else FinishReason.LENGTH


@cache
def lived(seed: int) -> Lifecycle:
    """The life of this seed, over and checked."""
    life = Lifecycle(seed)
    life.live()
    life.check_answers()
    counters = life.chain.engine.stats()
    life.events["void row"] += counters.void_rows
    life.events["held back"] += counters.held_back
    life.events["overlapped launch"] += counters.overlapped
    return life
