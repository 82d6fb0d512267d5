"""A script from a seed: often one row, or blocks for hardly more than one request; whatever can happen does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Final

from runahead.runtime.engine.figures import LogMode
from runahead.runtime.plan import PLAN_WORDS
from tests.runtime.chain import tightest_plan
from tests.runtime.programs.hash_model import VOCAB
from tests.simulation.completions import with_completions
from tests.simulation.script import DEPTHS, DRAFTING, DRAFTS, GRAMMARS, STATES, Ask, Event, Kind, Mode, Script, World
from tests.simulation.sieges import besieged, besieged_in_its_prompt

_MODES: Final = (Mode.PLAIN, Mode.DRAFTS, Mode.STATE_DRAFTS, Mode.STATE, Mode.MASKS)
_SIEGES: Final = 25
_PHASES: Final = ("WAITING", "PREFILL", "DECODE", "PAUSED", "LEAVING")
_ON_ONE: Final = (Kind.CANCEL, Kind.STOP_STRING, Kind.ABORT, Kind.ABORT)


def mode_of(seed: int) -> Mode:
    """Some of all seeds run with drafts, some with state slots, some with grammars."""
    return _MODES[seed % len(_MODES)]


def depths_of(seed: int) -> tuple[int, ...]:
    """All but one, beside serial: each seed leaves out another."""
    return tuple(depth for depth in DEPTHS if depth != 1 + seed % len(DEPTHS))


def turn_work_of(seed: int) -> int:
    """Half of all seeds read in a turn whatever has arrived, the others a little of it."""
    return random.Random(f"{seed} turn work").choice((0, 0, 4, 1))


def snapshots_of(seed: int) -> dict[str, int]:
    """Most seeds with state slots keep snapshots, often too few for all rows; the others find no prefixes."""
    dice = random.Random(f"{seed} snapshots")
    snapshots, blocks = dice.choice((0, 1, 2, 4, 12, 40)), dice.choice((1, 1, 2, 3))
    return {"snapshots": snapshots, "snapshot_blocks": blocks}


def draft_rows_of(seed: int, world: World) -> int:
    """In about half of the worlds that draft, launches with drafts are forms of their own, as on a GPU: of all rows, or
    of fewer than there may be."""
    dice = random.Random(f"{seed} draft rows")
    is_of_forms, rows = dice.random() < 0.5, dice.choice((1, 2, 3, world.max_rows))
    return min(rows, world.max_rows) if is_of_forms and world.mode in DRAFTING else 0


def make_script(seed: int, mode: Mode | None = None) -> Script:
    """The script of a seed. mode: the one that the seed says unless given."""
    script = _Author(seed, mode or mode_of(seed)).write()
    draft_rows = draft_rows_of(seed, script.world)
    script = replace(script, world=replace(script.world, turn_work=turn_work_of(seed), draft_rows=draft_rows))
    script = _with_callers(seed, script)
    if script.world.mode is Mode.STATE:
        script = replace(script, asks=_with_grammars(seed, script.asks))
    script = with_completions(seed, script)
    if seed % _SIEGES == _SIEGES - 1:
        return besieged(script)
    return besieged_in_its_prompt(script) if seed % _SIEGES == _SIEGES // 2 else script


def _with_grammars(seed: int, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """Of some seeds: rows with states wait for masks, too, and are held at a border with a snapshot, say."""
    dice = random.Random(f"{seed} late masks")
    if dice.random() > 0.4:
        return asks
    return tuple(ask if ask.is_sick or dice.random() < 0.4 else _structured(ask, dice) for ask in asks)


def _with_callers(seed: int, script: Script) -> Script:
    """Of some seeds: requests are of several callers, a few of whom may outrank the others. Who has no row gets one of
    who has several, at once or after a while."""
    dice = random.Random(f"{seed} callers")
    if dice.random() > 0.6:
        return script
    names = ("alice",) * dice.choice((2, 6)) + ("bob", "carol")[: dice.choice((1, 2))]
    outranking = {name for name in ("alice", "bob", "carol") if dice.random() < 0.2}
    callers = [dice.choice(names) for _ in script.asks]
    asks = [
        replace(ask, caller=caller, outranks=caller in outranking)
        for ask, caller in zip(script.asks, callers, strict=True)
    ]
    world = replace(script.world, patience_s=dice.choice((0.0, 0.0, 0.0, 1.0)))
    return replace(script, world=world, asks=tuple(asks))


def _structured(ask: Ask, dice: random.Random) -> Ask:
    """With a grammar, of several kinds: some force much, some little, and some lead nowhere."""
    kind = dice.choice(("any", "any", "some", "some", "one", "nothing"))
    return replace(ask, grammar=f"{kind} {dice.randint(1, 24)}", ignore_eos=False)


def _slow(world: World) -> World:
    """Prompts take many launches, in which the other rows cross many borders: some are evicted between two chunks."""
    return replace(
        world, max_rows=8, num_blocks=max(world.num_blocks, 1 + world.context_length // 4), block_size=4,
        prefill_chunk=4, max_prefill_tokens=4, plan_words=PLAN_WORDS,
    )  # fmt: skip


class _Author:
    def __init__(self, seed: int, mode: Mode) -> None:
        self.seed = seed
        self.dice = random.Random(f"{seed} {mode}")
        self.is_crowded = self.dice.random() < 0.6  # short prompts that grow long, several at a time, in few blocks
        self.world = self._world(mode)
        self.is_slow = self.is_crowded and self.dice.random() < 0.3
        if self.is_slow:
            self.world = _slow(self.world)
        self.is_choosy = self.dice.random() < 0.5  # requests say how their tokens are drawn
        # Two front ends take turns, and come again when all seems over.
        self.is_shared = self.dice.random() < (0.6 if self.world.turn_s > 1 else 0.3)
        # Prompts that begin alike find each other's blocks.
        self.stems = [self._tokens(self.world.context_length) for _ in range(self.dice.choice((1, 1, 2)))]

    def write(self) -> Script:
        dice = self.dice
        asks = self._asks(dice.choice((2, 5, 8, 12, 16, 20)))
        if self.is_shared:
            asks = self._from_two_front_ends(asks)
        dynasty = self._dynasty(len(asks), asks[-1].turn + 80)
        events = [event for handle in range(len(asks)) for event in self._on_one(handle, asks[handle])]
        events += self._on_all(asks)
        events += self._on_twins(asks) + self._on_latecomers(asks)
        kind = dice.choice((Kind.CANCEL, Kind.ABORT))
        events += [Event(kind, len(asks) + i, turn=heir.turn) for i, heir in enumerate(dynasty[1:])]
        asks += dynasty
        for lost in (event for event in events if event.kind is Kind.LOSE):
            asks = [replace(one, owner=3) if one.owner == lost.owner and one.turn >= lost.turn else one for one in asks]
        return Script(self.seed, self.world, tuple(asks), tuple(events))

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(2, VOCAB) for _ in range(count)]

    def _world(self, mode: Mode) -> World:
        dice = self.dice
        block_size = dice.choice((4, 4, 8, 8, 16))
        prefill_chunk = block_size * dice.choice((1, 1, 2, 4))
        context_length = dice.choice((32, 64, 64, 96))
        blocks = context_length // block_size
        max_rows = dice.choice((2, 3, 5, 8) if self.is_crowded else (1, 1, 2, 3, 5, 8))
        few, many = (blocks, blocks, blocks + 1, blocks + 3), (max(2, blocks // 2), blocks, 2 * blocks, 40)
        tight = tightest_plan(max_rows, prefill_chunk, block_size) + (
            0 if mode in (Mode.PLAIN, Mode.STATE) else 3 * DRAFTS
        )
        return World(
            mode=mode,
            depths=depths_of(self.seed),
            device_seed=dice.getrandbits(30) if dice.random() < 0.85 else -1,
            max_rows=max_rows,
            num_blocks=1 + dice.choice(few if self.is_crowded else many),
            block_size=block_size,
            context_length=context_length,
            prefill_chunk=prefill_chunk,
            max_prefill_tokens=prefill_chunk * dice.choice((1, 2)) + dice.choice((0, 3)),
            run_ahead_tokens=dice.choice((1, 20, 512, 512)),
            max_queue=dice.choice((1, 2, 100, 100, 100, 100)),
            plan_words=dice.choice((PLAN_WORDS, PLAN_WORDS, tight)),
            extra_slots=dice.choice((0, 0, 0, 1, 3)),
            penalty_slots=dice.choice((0, 1, 2, max_rows)),
            prefix_cache=dice.random() < 0.85,
            log_interval=dice.choice((0, 0, 1, 3, 7)),
            log_mode=dice.choice((LogMode.EVENTS, LogMode.BARRIER)),
            **({"mixed_prefill_tokens": prefill_chunk} if self.seed % 4 == 1 else {}),
            **({"mixed_graph_tokens": 4 * block_size + max_rows} if self.seed % 4 == 3 else {}),
            **(snapshots_of(self.seed) if mode in STATES else {}),
            **self._times(),
        )

    def _times(self) -> dict[str, Any]:
        """Most worlds know no time. In some a turn takes long, so that an abort of what comes late is forgotten; in
        some the device pauses for little less than the watchdog allows."""
        which = self.dice.random()
        if which < 0.15:
            return {"turn_s": 2.0, "launch_timeout_s": 64.0}
        if which < 0.35:
            return {"turn_s": 2**-6, "launch_timeout_s": 8.0, "pause_s": self.dice.choice((0.5, 7.0))}
        return {}

    # ------------------------------------------------------------ requests

    def _asks(self, count: int) -> list[Ask]:
        asks: list[Ask] = []
        turn, gap = 0, self.dice.choice((0, 2, 6))
        for handle in range(count):
            asks.append(self._ask(handle, turn))
            turn += self.dice.randint(0, gap)
        if count > 3 and self.dice.random() < 0.35:  # an id that may still be in use
            twin = self.dice.randrange(1, count)
            asks[twin] = replace(asks[twin], request_id=asks[twin - 1].request_id)
        return asks

    def _from_two_front_ends(self, asks: list[Ask]) -> list[Ask]:
        late, first = self.dice.choice((30, 60, 100)), len(asks) // 2
        return [replace(asks[i], owner=1 + i % 2, turn=asks[i].turn + late * (i >= first)) for i in range(len(asks))]

    def _dynasty(self, first: int, turn: int) -> list[Ask]:
        """Requests that begin alike, when the others are done. Each ends in the turn in which the next one comes, and
        launches in flight may still name the blocks that it finds."""
        dice, asks = self.dice, list[Ask]()
        prompt = tuple(self._tokens(self.world.context_length // 2))
        for handle in range(first, first + dice.choice((0, 0, 0, 0, 5))):
            asks.append(replace(self._ask(handle, turn), prompt=prompt, salt="", max_tokens=40, ignore_eos=True))
            asks[-1] = replace(asks[-1], prompt_logprobs=-1, sick_logits=-1, sick_hidden=-1)
            turn += dice.randint(6, 14)
        return asks

    def _ask(self, handle: int, turn: int) -> Ask:
        dice, world = self.dice, self.world
        prompt = self._prompt()
        lengths = (1, 2, dice.randint(1, 20), dice.randint(1, 40), world.context_length)
        max_tokens = dice.choice(lengths[3:] if self.is_crowded and dice.random() < 0.7 else lengths)
        ask = Ask(
            turn=turn,
            owner=dice.choice((1, 1, 2)),
            request_id=f"r{handle}",
            prompt=tuple(prompt),
            seed=(dice.getrandbits(48) << 8) + handle,
            max_tokens=max_tokens,
            min_tokens=dice.choice((0, 0, 0, min(max_tokens, 4))),
            stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice((0, 0, 0, 3)))),
            ignore_eos=dice.random() < 0.4,
            priority=dice.choice((0, 0, 0, 1, -1)),
            salt=dice.choice(("", "", "", "", "pepper")),
            prompt_logprobs=dice.choice((-1, -1, -1, -1, 0, 3)),
        )
        if dice.random() < 0.25:
            ask = replace(
                ask,
                repetition=dice.choice((1.0, 1.25)),
                presence=dice.choice((0.0, 0.5)),
                frequency=dice.choice((0.0, 0.25)),
            )
        if self.is_choosy:
            ask = self._drawn(ask)
        if self.is_slow and len(prompt) > 16:
            ask = replace(ask, prompt_logprobs=dice.choice((-1, 0, 2)), priority=dice.choice((0, -1)))
        if world.mode in GRAMMARS:
            return _structured(ask, dice) if dice.random() < 0.6 else ask
        return self._sicken(ask) if dice.random() < 0.08 else ask

    def _drawn(self, ask: Ask) -> Ask:
        """With what decides how its tokens are drawn, a few of these at a time."""
        dice, ids = self.dice, range(VOCAB)
        if dice.random() < 0.4:
            ask = replace(ask, temperature=dice.choice((0.0, 0.25, 0.75, 1.5)))
        if dice.random() < 0.4:
            ask = replace(
                ask,
                top_k=dice.choice((0, 1, 5, 40)),
                top_p=dice.choice((1.0, 0.5, 0.875)),
                min_p=dice.choice((0.0, 0.0625)),
            )
        if dice.random() < 0.3:
            bias = tuple(
                (token, dice.choice((-100.0, -1.5, 0.5, 8.0))) for token in dice.sample(ids, dice.randint(1, 6))
            )
            ask = replace(ask, bias=bias)
        if dice.random() < 0.3:
            ask = replace(ask, allowed=tuple(dice.sample(ids, dice.choice((1, 4, 12, 60)))))
        if dice.random() < 0.6:
            ask = replace(ask, logprobs=dice.choice((0, 1, 4)))
        return ask

    def _prompt(self) -> list[int]:
        """Often the beginning of a stem, and then its own."""
        dice, longest = self.dice, self.world.context_length - 1
        if dice.random() < 0.02:
            return self._tokens(longest + 1)  # too long
        chunk = self.world.prefill_chunk
        count = min(longest, dice.choice((1, chunk, 2 * chunk, dice.randint(1, longest), dice.randint(1, longest))))
        if self.is_crowded and dice.random() < 0.6:
            count = 1 + count % (1 + longest // 3)
        shared = dice.choice((0, count, count, count - 1, dice.randint(0, count)))
        return dice.choice(self.stems)[:shared] + self._tokens(count - shared)

    def _sicken(self, ask: Ask) -> Ask:
        """Logits of one of its tokens, or the hidden state of one of its query tokens, are not finite.

        Which query token must be one that the request itself computes, whatever it finds in the cache.
        """
        dice, world, count = self.dice, self.world, len(ask.prompt)
        later = count + dice.randint(0, min(ask.max_tokens, 8))
        if dice.random() < 0.4:
            return replace(ask, sick_logits=later)
        if dice.random() < 0.4:
            return replace(ask, sick_hidden=later)
        finds_nothing = (
            not world.prefix_cache or (world.mode is Mode.STATE and not world.snapshots) or ask.prompt_logprobs >= 0
        )
        first = 0 if finds_nothing else (count - 1) // world.block_size * world.block_size
        return replace(ask, sick_hidden=dice.randint(first, count - 1))

    # ------------------------------------------------------------ events

    def _on_one(self, handle: int, ask: Ask) -> list[Event]:
        dice = self.dice
        if dice.random() > 0.3:
            return []
        kind = dice.choice((Kind.DEADLINE, *_ON_ONE))
        owner = dice.choice((1, 2))
        also = tuple(dice.randrange(handle + 1) for _ in range(dice.choice((0, 0, 1, 3)))) if kind is Kind.ABORT else ()
        if kind is Kind.DEADLINE:
            return [Event(kind, handle, owner, turn=ask.turn + dice.randint(0, 30))]
        match dice.choice(("turn", "tokens", "phase", "phase")):
            case "turn":
                early = dice.choice((-2, -30, -60)) if kind is Kind.ABORT else 0  # an id may be aborted before it comes
                return [Event(kind, handle, owner, turn=max(0, ask.turn + dice.randint(early, 12)), also=also)]
            case "tokens":
                tokens = dice.choice((1, dice.randint(0, ask.max_tokens), ask.max_tokens - 1))
                return [Event(kind, handle, owner, tokens=tokens, also=also)]
        return [Event(kind, handle, owner, phase=dice.choice(_PHASES), also=also)]

    def _on_all(self, asks: list[Ask]) -> list[Event]:
        dice, last = self.dice, asks[-1].turn + 30
        events = [Event(Kind.DRAIN, turn=dice.randint(0, last)) for _ in range(dice.randint(0, 4))]
        for phase in ("PAUSED", "LEAVING", "PREFILL"):
            if dice.random() < (0.4 if self.is_crowded else 0.2):
                events.append(Event(dice.choice(_ON_ONE), owner=1, phase=phase))
            if dice.random() < 0.15:
                events.append(Event(Kind.DRAIN, phase=phase))
        if dice.random() < (0.4 if self.is_shared else 0.04):
            owner = dice.choice((1, 2)) if self.is_shared else 2
            events.append(Event(Kind.LOSE, owner=owner, turn=dice.choice(asks).turn + dice.randint(0, 12)))
        if dice.random() < 0.12:
            events.append(Event(Kind.ABORT_ALL, owner=dice.choice((1, 2)), turn=dice.randint(0, last)))
        if dice.random() < 0.06:
            events.append(Event(Kind.FAIL, dice.randrange(len(asks)), tokens=dice.randint(0, 3)))
        elif dice.random() < 0.06:
            events.append(Event(Kind.STALL, dice.randrange(len(asks)), tokens=dice.randint(0, 20)))
        return events

    def _on_twins(self, asks: list[Ask]) -> list[Event]:
        """An id that two requests bear is aborted before the first of them comes: that counts for the first alone."""
        twins = [handle for handle in range(1, len(asks)) if asks[handle].request_id == asks[handle - 1].request_id]
        turns = [(handle - 1, asks[handle - 1].turn - 1) for handle in twins if self.dice.random() < 0.5]
        return [Event(Kind.ABORT, handle, turn=turn) for handle, turn in turns if turn >= 0]

    def _on_latecomers(self, asks: list[Ask]) -> list[Event]:
        """Where turns take long, ids are aborted about as long before they come as that is remembered."""
        if self.world.turn_s <= 1:
            return []
        late = [handle for handle, ask in enumerate(asks) if ask.turn >= 40 and self.dice.random() < 0.2]
        return [Event(Kind.ABORT, handle, turn=asks[handle].turn - self.dice.randint(20, 40)) for handle in late]
