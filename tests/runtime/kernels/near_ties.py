"""Whether a difference between two completions of one request is a near tie, by the reference in float32.

Kernels that round in another order may say other tokens where two are almost equally good, and a router may send a
token to another expert where two are almost equally good to it. Everything behind such a difference may differ, so that
the first token that differs is what is looked at: how far the reference's logits would have to move for either of the
two to be its choice, and how close any router of the prefix was to another choice.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Experts
from runahead.runtime.kernels.reference.experts import ExpertBuffers
from runahead.runtime.kernels.reference.forward import ReferenceKernels, ReferenceStream
from runahead.runtime.kernels.reference.philox import gumbel, row_words
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from runahead.runtime.rounding import ceil_div
from runahead.runtime.row_record import signed_64
from runahead.runtime.wire.parameters import SamplingParams

F64 = NDArray[np.float64]

_BLOCK: Final = 16
_CHANGES: Final = {"repetition_penalty", "presence_penalty", "frequency_penalty", "bias_ids", "allowed_mask"}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two completions of a request first differ. prefix: its prompt, and the tokens that both have. tokens: the
    next one of each."""

    prefix: tuple[int, ...]
    tokens: tuple[int, int]


def first_difference(prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> Difference | None:
    """None: there is none. Raises ValueError where one is but the beginning of the other: no token differs there."""
    for place, pair in enumerate(zip(one, other, strict=False)):
        if pair[0] != pair[1]:
            return Difference((*prompt, *one[:place]), pair)
    if len(one) != len(other):
        raise ValueError(f"completions of {len(one)} and {len(other)} tokens differ in their length alone")
    return None


@dataclass(frozen=True, slots=True)
class Gaps:
    """scores: how far logits must move for either token to be the choice, in parts of the logits' standard deviation.

    router: the smallest distance, over all layers with experts and all tokens of the prefix, between the scores of the
    last expert that is chosen and of the first that is not, in parts of the standard deviation of that layer's scores
    over all of its experts and these tokens; infinite without experts.
    """

    scores: float
    router: float


class Kind(enum.Enum):
    SCORES = "a near tie of scores"
    ROUTER = "a near tie of a router"
    NEITHER = "not explained"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What counts as near, in the units of `Gaps`. A long prefix has a router that is close to another choice almost
    always, so that this alone would explain anything: behind one, scores may be further apart, and no further than
    `scores_behind_router`."""

    scores: float
    router: float
    scores_behind_router: float

    def kind_of(self, gaps: Gaps) -> Kind:
        if gaps.scores < self.scores:
            return Kind.SCORES
        if gaps.router < self.router and gaps.scores < self.scores_behind_router:
            return Kind.ROUTER
        return Kind.NEITHER


class Reference:
    """A checkpoint's model on the CPU: its weights as a model in bfloat16 has them, its arithmetic in float32."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError; ValueError for experts of several kinds, or that are not chosen by their scores."""
        checkpoint = open_checkpoint(folder)
        self.model = load_model(checkpoint, torch.device("cpu"), torch.bfloat16, "auto", ReferenceKernels())
        self._chosen = experts_chosen(self.model)

    @property
    def has_routers(self) -> bool:
        return any(self._chosen)

    def gaps(self, difference: Difference, sampling: SamplingParams) -> Gaps:
        """sampling: of the request, whose tokens no minimum or grammar holds back. Raises ValueError where it asks for
        something that makes logits others."""
        logits, router = self.after(difference.prefix)
        position = len(difference.prefix)
        moved = max(needed(logits, position, token, sampling) for token in difference.tokens)
        return Gaps(moved / float(logits.std()), router)

    @torch.inference_mode()
    def after(self, prefix: Sequence[int]) -> tuple[F64, float]:
        """The logits of the next token, [vocab], and `Gaps.router` of the prefix."""
        count = len(prefix)
        blocks = ceil_div(count, _BLOCK)
        batch = ForwardBatch(
            token_ids=torch.tensor(prefix),
            positions=torch.arange(count),
            slot_mapping=torch.arange(count) + _BLOCK,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_tables=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
            num_tokens=count,
            num_rows=1,
            max_seq_len=count,
            is_decode=count == 1,
            state_slots=torch.zeros(1, dtype=torch.int32),
            replayed=torch.zeros(1, dtype=torch.int32),
            certain=torch.tensor([count], dtype=torch.int32),
        )
        closest = math.inf

        def read_hidden(number: int, stream: ReferenceStream) -> None:
            nonlocal closest
            if number and self._chosen[number - 1]:
                own = next(each for each in stream.work.of_kinds if isinstance(each, ExpertBuffers))
                scores = own.scores.numpy()[:count]  # what this layer's router has left
                closest = min(closest, router_gap(scores, self._chosen[number - 1]))

        hidden = self.model.forward(batch, self.model.make_cache(blocks + 1, _BLOCK, 1), read_hidden=read_hidden)
        return self.model.logits(hidden[-1:])[0].numpy().astype(np.float64), closest


def experts_chosen(model: Decoder) -> list[int]:
    """Of each layer, how many experts a token chooses; 0: it has none. Raises as `Reference` does."""
    found = [layer.feed_forward for layer in model.weights.layers]
    experts = [each for each in found if isinstance(each, Experts)]
    if len({(each.count, each.width, each.activation) for each in experts}) > 1:
        raise ValueError("experts of several kinds in one model are not looked at")
    if not all(each.choice.by_score for each in experts):
        raise ValueError("routers that choose by more than their scores are not looked at")
    return [each.chosen if isinstance(each, Experts) else 0 for each in found]


def router_gap(scores: NDArray[np.float32], chosen: int) -> float:
    """The smallest distance between the last score that is chosen and the first that is not, in parts of all scores'
    standard deviation. scores: [tokens, experts] of one layer; infinite where each token chooses all."""
    if chosen >= scores.shape[1]:
        return math.inf
    ordered = np.sort(scores.astype(np.float64), axis=1)
    return float((ordered[:, -chosen] - ordered[:, -chosen - 1]).min() / scores.std(dtype=np.float64))


def needed(logits: F64, position: int, token: int, sampling: SamplingParams) -> float:
    """How far logits must move, at most, until `token` is what is sampled at `position`; 0: it is what they say.

    logits: [vocab], raw. The distance is one of logits also where a token is drawn: the noise is multiplied by the
    temperature. For every token that is ahead, the two must change places, or a filter must cut it off; and none must
    cut off `token` itself. Raises ValueError where penalties, a bias or a mask come before all of this.
    """
    defaults = SamplingParams()
    changed = {name for name in _CHANGES if getattr(sampling, name) != getattr(defaults, name)}
    if changed:
        raise ValueError(f"logits are changed before a token is chosen: {sorted(changed)}")
    temperature = float(np.float32(sampling.temperature))
    if not temperature:
        return float(logits.max() - logits[token])
    seed = np.array([signed_64(sampling.seed)], np.int64)
    words = row_words(seed, np.array([position], np.int64), logits.size)[0, : logits.size]
    scores = logits + temperature * gumbel(words).astype(np.float64)
    inside = borders(logits, sampling)
    ahead = np.minimum(scores - scores[token], np.maximum(inside, 0.0))
    return max(float(ahead.max()), -float(inside[token]), 0.0)


def borders(logits: F64, sampling: SamplingParams) -> F64:
    """How far each token is inside of what the filters leave, in logits; below 0: outside, by so much. [vocab]

    Top-k and min-p have a border among the logits. Top-p keeps a token if those ahead of it have less than a share p of
    the probability. So it is inside as far as these must all rise together against the rest to have it (they have f,
    and rise by the temperature times log(p / (1 - p)) - log(f / (1 - f))), or as far as it must fall behind those that
    are cut off, whichever is less. A token that is outside comes in by whichever is less, too.
    """
    order = np.argsort(-logits, kind="stable")
    ordered, size = logits[order], logits.size
    temperature = float(np.float32(sampling.temperature))
    kept = sampling.top_k if 0 < sampling.top_k < size else size
    inside = _beyond(ordered, kept)
    if sampling.top_p < 1:
        share = float(np.float32(sampling.top_p))
        mass = np.exp((ordered - ordered[0]) / temperature)
        mass[kept:] = 0.0
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]]) / mass.sum()
        count = max(1, int(np.count_nonzero(before < share)))
        with np.errstate(divide="ignore"):
            odds = np.log(before) - np.log1p(-np.minimum(before, 1.0))
        rise = temperature * (math.log(share) - math.log1p(-share) - odds)
        by_order = _beyond(ordered, count)
        nearer = np.where(by_order > 0, np.minimum(rise, by_order), np.maximum(rise, by_order))
        nearer[kept:] = np.inf  # which top-k has cut off
        inside = np.minimum(inside, nearer)
    if sampling.min_p > 0:
        lowest = ordered[0] + temperature * math.log(float(np.float32(sampling.min_p)))
        inside = np.minimum(inside, ordered - lowest)
    found = np.empty(size)
    found[order] = inside
    return found


def _beyond(ordered: F64, count: int) -> F64:
    """Of descending logits, [vocab], how far the first `count` are above the next one; the others, how far they are
    below the last of these, as negative numbers."""
    found = np.full(ordered.size, np.inf)
    if count < ordered.size:
        found[:count] = ordered[:count] - ordered[count]
        found[count:] = ordered[count:] - ordered[count - 1]
    return found
