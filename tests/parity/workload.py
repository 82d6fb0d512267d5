"""Random workloads from a seed: what each request asks, when it arrives, and when it is aborted or cancelled."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from runahead.v1 import GenerateRequest

CONTEXT = 192
VOCAB = 4096
EOS_LIKE = tuple(range(10, 200))  # stop token ids are drawn from frequent ids, so that they are met

SNIPPETS = (
    "def add(a, b):\n    ",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.",
    "def read(path):\n    with open(path) as f:\n        return ",
    "for i in range(10):\n    print(",
    "    def get(self, key, default=None):\n        ",
    "x",
)
STOPS = ("\n", "return", "self", ":\n", ")", "    ", "def ")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a workload.

    delay_s: after the workload began. abort_after, cancel_after: tokens after which it is aborted by id, or its stream
    cancelled; 0 never, -1 at once.
    """

    request: GenerateRequest
    delay_s: float
    abort_after: int
    cancel_after: int


def _sampling(dice: random.Random, request: GenerateRequest) -> None:
    sampling = request.sampling
    if dice.random() < 0.35:
        sampling.temperature = 0.0
    else:
        sampling.temperature = dice.choice((0.3, 0.7, 1.0, 1.5))
        if dice.random() < 0.35:
            sampling.top_k = dice.choice((1, 5, 40))
        if dice.random() < 0.35:
            sampling.top_p = dice.choice((0.3, 0.9, 0.99))
        if dice.random() < 0.25:
            sampling.min_p = dice.choice((0.02, 0.2))
    sampling.seed = dice.getrandbits(64)
    if dice.random() < 0.2:
        for _ in range(dice.randint(1, 20)):
            sampling.logit_bias[dice.randrange(VOCAB)] = dice.uniform(-8, 8)
    if dice.random() < 0.12:
        sampling.allowed_token_ids.extend(dice.sample(range(VOCAB), dice.randint(1, 300)))


def _stopping(dice: random.Random, request: GenerateRequest) -> None:
    stopping = request.stopping
    stopping.max_tokens = dice.choice((1, 12, 24, 32, 32, 40, 40, 48, 400))
    if dice.random() < 0.3:
        stopping.ignore_eos = True
    if dice.random() < 0.2:
        stopping.min_tokens = min(stopping.max_tokens, dice.randint(1, 12))
    if dice.random() < 0.3:
        stopping.stop.extend(dice.sample(STOPS, dice.randint(1, 3)))
        stopping.include_stop = dice.random() < 0.5
    if dice.random() < 0.25:
        stopping.stop_token_ids.extend(dice.sample(EOS_LIKE, dice.randint(1, 12)))


def _prompt(dice: random.Random, request: GenerateRequest) -> None:
    kind = dice.random()
    if kind < 0.5:
        request.text = "".join(dice.choices(SNIPPETS, k=dice.randint(1, 3)))
    else:
        length = dice.randint(1, 20) if kind < 0.7 else dice.randint(80, CONTEXT - 4)
        request.token_ids.ids.extend(dice.randrange(2, VOCAB) for _ in range(length))


def workload(seed: int) -> list[Asked]:
    """20 to 28 requests that arrive within a fraction of a second of each other."""
    dice = random.Random(seed)
    asked: list[Asked] = []
    for i in range(dice.randint(20, 28)):
        request = GenerateRequest(request_id=f"s{seed}-{i}", priority=dice.choice((0, 0, 0, 1)))
        _prompt(dice, request)
        _sampling(dice, request)
        _stopping(dice, request)
        if dice.random() < 0.3:
            request.output.logprobs = dice.choice((0, 1, 5))
        fate = dice.random()
        abort_after = dice.choice((-1, 1, 4)) if fate < 0.1 else 0
        cancel_after = dice.choice((1, 4)) if 0.1 <= fate < 0.16 else 0
        asked.append(Asked(request, dice.uniform(0, 0.08), abort_after, cancel_after))
    return asked


def kinds(asked: list[Asked]) -> Counter[str]:
    """How often a workload asks for each thing."""
    counts: Counter[str] = Counter()
    for item in asked:
        sampling, stopping, output = item.request.sampling, item.request.stopping, item.request.output
        counts["requests"] += 1
        counts["greedy"] += sampling.temperature == 0
        counts["temperature"] += sampling.temperature > 0
        counts["top_k"] += sampling.top_k > 0
        counts["top_p"] += sampling.HasField("top_p")
        counts["min_p"] += sampling.min_p > 0
        counts["logit_bias"] += bool(sampling.logit_bias)
        counts["allowed_token_ids"] += bool(sampling.allowed_token_ids)
        counts["min_tokens"] += stopping.min_tokens > 0
        counts["ignore_eos"] += stopping.ignore_eos
        counts["stop strings"] += bool(stopping.stop)
        counts["stop token ids"] += bool(stopping.stop_token_ids)
        counts["logprobs"] += output.HasField("logprobs")
        counts["prompts in several chunks"] += len(item.request.token_ids.ids) > 32
    return counts
