"""Rows whose next block comes with the very launch that drafts into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from runahead.runtime.memory.block_pool import NO_SLOT
from tests.runtime.launches import ENDLESS, Launches, _Row
from tests.runtime.programs.head_worlds import ALL, BLOCK, EACH, GREEDY, PROMPT

# Two rows that come to each border together: before their blocks have come, the tables of both name the null block.
PROMPTS: Final[Mapping[int, list[int]]] = {0: PROMPT, 1: PROMPT[::-1]}


class Started(Protocol):
    """A world of rows on the CPU, or on Triton's kernels."""

    def started(self) -> tuple[object, Launches]: ...


def completed(world: Started, count: int) -> dict[int, list[int]]:
    """The prompts and what follows each, row by row."""
    texts = dict[int, list[int]]()
    for slot, prompt in PROMPTS.items():
        _, launches = world.started()
        launches.begin(0, prompt, GREEDY)
        launches.launch({0: ALL})
        texts[slot] = [*prompt, *launches.decode((0,), count)[0]]
    return texts


@dataclass
class Foreseen:
    """What was proposed of each row, by slot and length; the rows are shown what they are going to say."""

    texts: Mapping[int, Sequence[int]]
    proposed: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def shown(self, slot: int, length: int, own: Sequence[int]) -> list[int]:
        self.proposed[slot, length] = list(own)
        return list(self.texts[slot][length : length + len(own)])


def live_over_borders(launches: Launches, texts: Mapping[int, Sequence[int]], drafts: int, until: int) -> int:
    """The rows, all of whose drafts are right, up to a length. A block comes with the launch in which a row may first
    reach into it. Returns how many came so that the drafts of the same launch were made across the border."""
    prompt_len = len(PROMPT)
    given = -(-prompt_len // BLOCK)
    for slot, prompt in PROMPTS.items():
        first = 1 + slot * EACH
        blocks = (*range(first, first + given), *[0] * (EACH - given))
        launches._rows[slot] = row = _Row(list(prompt), prompt_len, GREEDY, NO_SLOT, blocks, ENDLESS, 1 << 20)
        row.state = launches.state_of(slot)
    launches.launch(dict.fromkeys(PROMPTS, ALL))
    length, crossed = prompt_len + 1, 0  # once the next S has kept its tokens
    while length < until:
        due = -(-(length + drafts) // BLOCK)
        appends = [(slot, place, 1 + slot * EACH + place) for slot in PROMPTS for place in range(given, due)]
        runs = launches.launch(dict.fromkeys(PROMPTS, 1), drafts=drafts, appends=appends).runs
        for slot, run in runs.items():
            assert [cell.token for cell in run] == list(texts[slot][length - len(run) : length])
        # The drafter's last step has the token before the last draft.
        crossed += due > given and length - 2 + drafts >= given * BLOCK
        given, length = due, length + 1 + drafts
    return crossed
