"""What front ends were sent, request by request, each message checked against what may follow what."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.simulation.completions import completions_of
from tests.simulation.oracle import Entry
from tests.simulation.script import Ask, Script, Wires


class OutOfOrder(AssertionError):
    """A message that may not follow what was said of its request before."""


@dataclass(slots=True)
class Heard:
    """All that one request was told. unheard: its front end gave it up or is gone, and nothing more may come."""

    is_accepted: bool = False
    is_admitted: bool = False
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    prompt_entries: list[Entry] = field(default_factory=list)
    refusal: m.Refused | None = None
    reason: FinishReason | None = None
    stop_token_id: int = -1
    unheard: bool = False

    @property
    def is_over(self) -> bool:
        return self.unheard or self.refusal is not None or self.reason is not None


class Transcript:
    """heard: by handle. outcomes: of aborts."""

    def __init__(self, script: Script, wires: Wires) -> None:
        self.heard: dict[int, Heard] = defaultdict(Heard)
        self.outcomes: Counter[str] = Counter()
        self._answers: list[tuple[int, m.AbortResult]] = []  # to aborts, not taken yet
        self._script = script
        self._wires = wires
        self._newest: Counter[int] = Counter()  # launch of the newest output, by front end

    def read(self, sent: list[tuple[int, m.ToFrontEnd]]) -> None:
        """Everything sent since the last look, which is taken away. Raises OutOfOrder."""
        for owner, message in sent:
            match message:
                case m.Accepted():
                    for heard in self._of_all(owner, message.handle, message):
                        self._must(not heard.is_accepted and heard.refusal is None, message)
                        heard.is_accepted = True
                case m.Refused():
                    for heard in self._of_all(owner, message.handle, message):
                        self._must(not heard.is_accepted and heard.refusal is None, message)
                        heard.refusal = message
                case m.Admitted():
                    _, heard = self._of(owner, message.handle, message)
                    self._must(heard.is_accepted and not heard.is_admitted, message)
                    heard.is_admitted, heard.cached_tokens = True, message.cached_tokens
                case m.PromptLogprobs():
                    self._prompt(owner, message)
                case m.Output():
                    self._output(owner, message)
                case m.AbortResult():
                    self.outcomes.update(message.outcomes)
                    self._answers.append((owner, message))
        sent.clear()

    def take_answers(self) -> list[tuple[int, m.AbortResult]]:
        """Answers to aborts since the last call, and to whom, in order."""
        answers, self._answers = self._answers, []
        return answers

    def _of(self, owner: int, number: int, message: object, *, unheard: bool = False) -> tuple[Ask, Heard]:
        """number: on the front end's connection. unheard: the message may come although nobody listens any more."""
        handle = self._wires.handle(owner, number)
        if handle is None:
            raise OutOfOrder(f"front end {owner} has no such request: {message}")
        heard = self.heard[handle]
        self._must(unheard or not heard.is_over, message)
        return self._script.asks[handle], heard

    def _of_all(self, owner: int, number: int, message: object) -> list[Heard]:
        """Of all completions of a prompt, of the first of which something is said."""
        handle = self._wires.handle(owner, number)
        if handle is None or self._script.asks[handle].index:
            raise OutOfOrder(f"front end {owner} has sent no such request: {message}")
        return [self.heard[one] for one in completions_of(self._script.asks, handle)]

    def _prompt(self, owner: int, message: m.PromptLogprobs) -> None:
        ask, heard = self._of(owner, message.handle, message)
        wanted = ask.prompt_logprobs
        chosen = np.frombuffer(message.chosen, np.float32)
        top_ids = np.frombuffer(message.top_ids, np.int32).reshape(chosen.size, wanted)
        top = np.frombuffer(message.top_logprobs, np.float32).reshape(chosen.size, wanted)
        self._must(heard.is_admitted and not heard.tokens, message)
        self._must(message.offset == 1 + len(heard.prompt_entries), message)
        for i, value in enumerate(chosen.tolist()):
            heard.prompt_entries.append(Entry(value, tuple(top_ids[i].tolist()), tuple(top[i].tolist())))

    def _output(self, owner: int, message: m.Output) -> None:
        if message.launch:  # 0: an end from outside, between launches
            self._must(message.launch > self._newest[owner], message)
            self._newest[owner] = message.launch
        handles = np.frombuffer(message.handles, np.int64).tolist()
        described = {one.index: Entry(one.chosen, one.top_ids, one.top_logprobs) for one in message.logprobs}
        self._must(len(described) == len(message.logprobs), message)
        for index, (handle, token) in enumerate(zip(handles, _int32(message.tokens), strict=True)):
            ask, heard = self._of(owner, handle, message)
            self._must(heard.is_admitted and len(heard.tokens) < ask.max_tokens, message)
            if ask.prompt_logprobs >= 0:
                self._must(len(heard.prompt_entries) == len(ask.prompt) - 1, message)
            heard.tokens.append(token)
            self._must((index in described) == (ask.logprobs >= 0), message)
            if index in described:
                heard.entries.append(described.pop(index))
        self._must(not described, message)
        for end in message.finished:
            _, heard = self._of(owner, end.handle, message)
            self._must(heard.is_accepted and end.cached_tokens == heard.cached_tokens, message)
            heard.reason, heard.stop_token_id = FinishReason(end.reason), end.stop_token_id

    @staticmethod
    def _must(holds: bool, message: object) -> None:
        if not holds:
            raise OutOfOrder(f"out of order, or to nobody: {message}")


def _int32(column: bytes) -> list[int]:
    return np.frombuffer(column, np.int32).tolist()
