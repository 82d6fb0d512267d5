"""What is done to an engine: its sizes, the requests it is asked and the events they meet. The same at every depth."""

from __future__ import annotations

import enum
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from runahead.runtime.engine.figures import LogMode
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.programs.hash_model import VOCAB

SERIAL: Final = 0
DEPTHS: Final = (1, 2, 3, 4)
ANYONE: Final = -1


class Mode(enum.StrEnum):
    """Which model runs, and so what a row holds and what a launch may bring."""

    PLAIN = "plain"  # one token a launch, KV blocks alone
    DRAFTS = "drafts"  # 1 to 1 + DRAFTS tokens a launch
    STATE = "state"  # a state slot a row beside its blocks
    STATE_DRAFTS = "drafts over state"  # both of these, and rows with a grammar beside them
    MASKS = "masks"  # rows with a grammar, whose masks come late; what it forces is drafted, up to DRAFTS tokens


DRAFTING: Final = (Mode.DRAFTS, Mode.STATE_DRAFTS, Mode.MASKS)  # in which launches may have drafts
STATES: Final = (Mode.STATE, Mode.STATE_DRAFTS)  # in which rows have a recurrent state
GRAMMARS: Final = (Mode.MASKS, Mode.STATE_DRAFTS)  # in which they may have a grammar
DRAFTS: Final = 3


class Kind(enum.StrEnum):
    """What happens to a request, or to all."""

    CANCEL = "cancel"  # its stream is gone
    DEADLINE = "deadline"  # as CANCEL, at a time
    STOP_STRING = "stop string"  # its front end has seen enough
    ABORT = "abort"
    ABORT_ALL = "abort all"
    LOSE = "lose"  # a front end is gone
    DRAIN = "drain"
    FAIL = "fail"  # the device fails with the next thing it does
    STALL = "stall"  # the device does nothing any more, and does not say so


@dataclass(frozen=True, slots=True)
class World:
    """The engine's sizes. device_seed: of its delays; -1: it is always done at once. extra_slots: of its rings, beside
    `run_ahead` + 2. depths: each is run and compared with serial. turn_s: that a turn takes beside its waits. pause_s:
    for which the device does nothing now and then. turn_work: pieces of work that a turn does for what has arrived; 0:
    as many as there are. snapshots: of states that there is room for, where rows have one, of a row at every
    snapshot_blocks-th border. draft_rows: above 0, launches with drafts are forms of their own, of up to so many rows
    that all decode, as on a GPU. patience_s, mixed_prefill_tokens, mixed_graph_tokens: see `SchedulerLimits`. Seconds
    are of the simulated clock, and exact in binary."""

    mode: Mode
    depths: tuple[int, ...]
    device_seed: int
    max_rows: int
    num_blocks: int
    block_size: int
    context_length: int
    prefill_chunk: int
    max_prefill_tokens: int
    run_ahead_tokens: int = 512
    max_queue: int = 100
    plan_words: int = PLAN_WORDS
    extra_slots: int = 0
    penalty_slots: int = 0
    prefix_cache: bool = True
    log_interval: int = 0
    log_mode: LogMode = LogMode.EVENTS
    turn_s: float = 0.0
    pause_s: float = 0.0
    launch_timeout_s: float = 32.0
    turn_work: int = 0
    snapshots: int = 0
    snapshot_blocks: int = 0
    draft_rows: int = 0
    patience_s: float = 1.0
    mixed_prefill_tokens: int = sys.maxsize
    mixed_graph_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its handle is its place in the script (on its front end's connection see `Wires`), and no two have
    the same seed.

    turn: when it is sent. sick_logits: position of the token whose logits are not finite. sick_hidden: position of the
    query token whose hidden state is not finite, and with it all that attends to it. -1: none. bias: ids, each once,
    and values. index: which completion of its prompt it is; those of one prompt follow each other, and the first one's
    message asks for all. The rest is as in `SamplingParams` and `StoppingParams`; numbers are exact in float32.
    """

    turn: int
    owner: int
    request_id: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    salt: str = ""
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt_logprobs: int = -1
    sick_logits: int = -1
    sick_hidden: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    logprobs: int = -1
    caller: str = ""
    outranks: bool = True  # its priority counts beside other callers', too
    grammar: str = ""  # of `tests.runtime.late_masks.MadeUpMatcher`
    index: int = 0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            bias_ids=tuple(token for token, _ in self.bias),
            bias_values=tuple(value for _, value in self.bias),
            allowed_mask=self._allowed_mask,
            logprobs=self.logprobs,
            repetition_penalty=self.repetition,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            prompt_logprobs=self.prompt_logprobs,
        )

    @property
    def _allowed_mask(self) -> bytes:
        """A bit for each token of the vocabulary, or nothing if all are allowed."""
        bits = sum(1 << token for token in set(self.allowed))
        return bits.to_bytes(-(-VOCAB // 32) * 4, "little") if self.allowed else b""

    @property
    def stopping(self) -> StoppingParams:
        return StoppingParams(self.max_tokens, self.min_tokens, self.stop_token_ids, self.ignore_eos)

    @property
    def is_sick(self) -> bool:
        return self.sick_logits >= 0 or self.sick_hidden >= 0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens once: at a turn, or when request `handle` has so many tokens, or is in a phase.

    handle: the request it is about, or ANYONE: the first that is in that phase; of LOSE, DRAIN, FAIL, STALL and
    ABORT_ALL only the one it waits for. owner: of ABORT and ABORT_ALL the front end that asks, of LOSE the one that is
    lost. also: of ABORT, more requests that are named in the same message, after the first.
    """

    kind: Kind
    handle: int = ANYONE
    owner: int = 1
    turn: int = -1
    tokens: int = -1
    phase: str = ""
    also: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Script:
    """asks: in the order in which they are sent; those of one turn are read at once."""

    seed: int
    world: World
    asks: tuple[Ask, ...]
    events: tuple[Event, ...]

    def in_forms(self) -> Script:
        """The same where launches with drafts are forms of their own, which hold all rows."""
        return replace(self, world=replace(self.world, draft_rows=self.world.max_rows))

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


class Wires:
    """What a request is called on its front end's connection. Each front end counts its own up from 1, so that two of
    them use the same numbers for different requests."""

    def __init__(self, script: Script) -> None:
        self.numbers: list[int] = []  # by handle
        self._handles: dict[tuple[int, int], int] = {}
        counts = Counter[int]()
        for handle, ask in enumerate(script.asks):
            counts[ask.owner] += 1
            self.numbers.append(counts[ask.owner])
            self._handles[ask.owner, counts[ask.owner]] = handle

    def handle(self, owner: int, number: int) -> int | None:
        """The handle of a front end's request. None: it has none of that number."""
        return self._handles.get((owner, number))

    def of(self, request: Request) -> int:
        """The handle of a request as the engine knows it."""
        return self._handles[request.owner, request.handle]


def read_script(path: Path) -> Script:
    """Raises msgspec.ValidationError for a file that is none."""
    return msgspec.json.decode(path.read_bytes(), type=Script)
