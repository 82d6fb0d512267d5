"""Random workloads from a seed: what each request asks, when it arrives, and when it is aborted or cancelled."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from runahead.v1 import GenerateRequest

CONTEXT = 192
VOCAB = 4096
LONG = 100  # tokens of a prompt after which a completion may fill the context without many launches of few rows
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
class After:
    """The moment when a request of the workload, by its place, has brought so many tokens, or is over."""

    request: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a workload.

    after: when it is sent; None: as the workload begins. delay_s: later than that. abort_after, cancel_after: tokens
    after which it is aborted by id, or its stream cancelled; 0 never, -1 at once.
    """

    request: GenerateRequest
    delay_s: float = 0.0
    abort_after: int = 0
    cancel_after: int = 0
    after: After | None = None

    @property
    def is_cut(self) -> bool:
        """Something may end it from outside."""
        return bool(self.abort_after or self.cancel_after)


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
    if dice.random() < 0.25:
        sampling.repetition_penalty = dice.choice((0.8, 1.0, 1.1, 1.5))
        sampling.presence_penalty = dice.choice((-0.5, 0.5, 1.5))
        sampling.frequency_penalty = dice.choice((0.0, 0.3, 1.0))


def _stopping(dice: random.Random, request: GenerateRequest) -> None:
    stopping = request.stopping
    stopping.max_tokens = dice.choice((1, 12, 24, 40, 48, 48, 64, 64))
    if len(request.token_ids.ids) > LONG and dice.random() < 0.4:
        stopping.max_tokens = 400  # the context ends first
    if dice.random() < 0.3:
        stopping.ignore_eos = True
    if dice.random() < 0.2:
        stopping.min_tokens = min(stopping.max_tokens, dice.randint(1, 12))
    if dice.random() < 0.3:
        stopping.stop.extend(dice.sample(STOPS, dice.randint(1, 3)))
        stopping.include_stop = dice.random() < 0.5
    if dice.random() < 0.25:
        stopping.stop_token_ids.extend(dice.sample(EOS_LIKE, dice.randint(1, 12)))


def _output(dice: random.Random, request: GenerateRequest) -> None:
    output = request.output
    if dice.random() < 0.3:
        output.logprobs = dice.choice((0, 1, 5))
    if dice.random() < 0.2:
        output.prompt_logprobs = dice.choice((0, 1, 4))
    if dice.random() < 0.15:
        output.echo = True
    if dice.random() < 0.15:
        output.max_tokens_per_message = dice.choice((1, 7))


def _prompt(dice: random.Random, request: GenerateRequest, prefixes: list[list[int]]) -> None:
    kind = dice.random()
    if kind < 0.5:
        request.text = "".join(dice.choices(SNIPPETS, k=dice.randint(1, 3)))
    elif kind < 0.75:
        request.token_ids.ids.extend(dice.choice(prefixes) + random_ids(dice, dice.randint(0, 20)))
        request.cache_salt = dice.choice(("", "", "pepper"))
    else:
        length = dice.randint(1, 20) if kind < 0.85 else dice.randint(70, CONTEXT - 4)
        request.token_ids.ids.extend(random_ids(dice, length))


def random_ids(dice: random.Random, count: int) -> list[int]:
    """Token ids without a meaning of their own."""
    return [dice.randrange(2, VOCAB) for _ in range(count)]


def workload(seed: int) -> list[Asked]:
    """16 to 20 requests that arrive within a fraction of a second of each other. Some prompts begin alike."""
    dice = random.Random(seed)
    prefixes = [random_ids(dice, dice.randint(20, 50)) for _ in range(2)]
    asked: list[Asked] = []
    for i in range(dice.randint(16, 20)):
        request = GenerateRequest(request_id=f"s{seed}-{i}", priority=dice.choice((-1, 0, 0, 0, 3)))
        _prompt(dice, request, prefixes)
        _sampling(dice, request)
        _stopping(dice, request)
        _output(dice, request)
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
        counts["penalties"] += sampling.HasField("repetition_penalty")
        counts["logprobs"] += output.HasField("logprobs")
        counts["prompt logprobs"] += output.HasField("prompt_logprobs")
        counts["echo"] += output.echo
        counts["cache salt"] += bool(item.request.cache_salt)
        counts["priority"] += item.request.priority != 0
        counts["prompts in several chunks"] += len(item.request.token_ids.ids) > 32
    return counts
