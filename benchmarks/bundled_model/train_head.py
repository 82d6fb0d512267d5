"""Train the bundled model's draft head.

    python -m benchmarks.bundled_model.corpus --out corpus.json
    python -m benchmarks.bundled_model.train_head --corpus corpus.json --out runtime/models/bundled/draft_head

It learns from the train files and from what the model itself writes behind their functions' heads, since that is what
it will draft. The model's hidden states are computed once and kept in memory: 512 bytes a token. The head
that is kept is the best on what the model writes greedily behind heads of the dev files.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.bundled_model.batches import encode
from benchmarks.bundled_model.head_network import HeadNetwork, save_head
from benchmarks.bundled_model.head_text import (
    Rows,
    batches,
    bundled_network,
    completions,
    frequent,
    heads_of,
    with_hidden,
)
from benchmarks.bundled_model.network import Network, Shape
from benchmarks.bundled_model.train import rate_at

ROW_TOKENS = 512
CHECKS = 6  # how often the dev files are scored
PLACES = 7  # of a run that are scored
ALONE = 0.6  # of the steps, the first ones: only the first place of the run is trained
FADING = 0.85  # of the loss with each place of the run


def prepare(
    network: Network, corpus: Path, tokenizer: Tokenizer, text: int, written: int, seed: int
) -> tuple[list[Rows], Rows]:
    """Rows to train on, and greedy completions of the dev files' heads."""
    device = network.cos.device
    stream = [token for file in encode(corpus, "train", tokenizer).files for token in file]
    rows = torch.tensor(stream[: len(stream) // ROW_TOKENS * ROW_TOKENS], device=device).view(-1, ROW_TOKENS)
    taken = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:text]
    pools = [with_hidden(network, rows[taken.to(device)], 32)]
    if written:
        said = completions(network, tokenizer, heads_of(corpus, "train"), written, ROW_TOKENS, 256, seed)
        pools.append(with_hidden(network, said, 32))
    dev = completions(network, tokenizer, heads_of(corpus, "dev"), 64, ROW_TOKENS, 64, seed)
    return pools, with_hidden(network, dev[::2], 32)  # the greedy ones


def losses(head: HeadNetwork, network: Network, rows: Rows, steps: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of hidden states and of the next token's distribution, each the mean over places and positions. chosen: indexes
    of positions of a row, of which the distribution is compared."""
    lm_head = network.model.embed_tokens.weight
    expected = head.unrolled(F.embedding(rows.ids, lm_head).to(rows.hidden.dtype), rows.hidden, steps)
    true = rows.hidden[:, 1:]
    with torch.no_grad():
        wanted = F.softmax(F.linear(true[:, chosen], lm_head.to(true.dtype)).float(), dim=-1)
    of_hidden, of_tokens, weight = torch.zeros(()), torch.zeros(()), 0.0
    for place, states in enumerate(expected):
        share = FADING**place
        logs = F.log_softmax(F.linear(states[:, chosen], lm_head.to(true.dtype)).float(), dim=-1)
        there = (chosen >= place).float()
        of_tokens = of_tokens - share * ((wanted * logs).sum(-1) * there).mean()
        of_hidden = of_hidden + share * F.smooth_l1_loss(states[:, place:], true[:, place:].float())
        weight += share
    return of_hidden / weight, of_tokens / weight


@torch.no_grad()
def acceptance(head: HeadNetwork, network: Network, rows: Rows, guessed: Tensor) -> list[float]:
    """The share of right drafts by their place in a run, among those whose place is reached; the last number is how
    many tokens a launch brings. rows: greedy completions, so that a draft is right which is the model's likeliest.
    guessed: tokens that may be drafted."""
    lm_head = network.model.embed_tokens.weight
    reached, right = [0.0] * PLACES, [0.0] * PLACES
    for ids, hidden in zip(rows.ids.split(16), rows.hidden.split(16), strict=True):
        with torch.autocast(ids.device.type, torch.bfloat16):
            expected = head.unrolled(F.embedding(ids, lm_head).to(hidden.dtype), hidden, PLACES)
            truth = F.linear(hidden[:, 1:], lm_head).argmax(-1)
            so_far = torch.ones_like(truth, dtype=torch.bool)
            so_far[:, : ids.shape[1] // 2] = False  # no prompt is scored
            for place, states in enumerate(expected):
                hits = guessed[F.linear(states, lm_head[guessed]).argmax(-1)] == truth
                if place:
                    so_far = F.pad(so_far, (1, 0))[:, :-1]
                reached[place] += float(so_far.sum())
                so_far = so_far & hits
                right[place] += float(so_far.sum())
    shares = [hits / max(1.0, looked_at) for hits, looked_at in zip(right, reached, strict=True)]
    return [*shares, 1 + sum(math.prod(shares[: n + 1]) for n in range(PLACES))]


def train(network: Network, pools: list[Rows], dev: Rows, arguments: argparse.Namespace, shape: Shape) -> list[float]:
    """Train a head, and save it whenever it is better on the dev rows than before. Returns the best `acceptance`."""
    device = network.cos.device
    torch.manual_seed(arguments.seed)
    head = HeadNetwork(shape).to(device)
    matrices = [parameter for parameter in head.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in head.parameters() if parameter.dim() == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=arguments.rate, weight_decay=arguments.decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    guessed = frequent(pools, shape.vocabulary, arguments.guessed)
    stream, started, best, kept = batches(pools, arguments.tokens, arguments.seed), time.monotonic(), 0.0, [0.0]
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters", flush=True)
    for step in range(1, arguments.steps + 1):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.rate * rate_at((step - 1) / arguments.steps)
        rows = next(stream)
        length = rows.ids.shape[1] - 1
        chosen = torch.randperm(length, device=device)[: int(length * arguments.compared)]
        with torch.autocast(device.type, torch.bfloat16):
            places = arguments.unroll if step > arguments.steps * ALONE else 1
            of_hidden, of_tokens = losses(head, network, rows, places, chosen)
        (arguments.hidden_weight * of_hidden + of_tokens).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step * CHECKS // arguments.steps > (step - 1) * CHECKS // arguments.steps:
            shares = acceptance(head, network, dev, guessed)
            print(
                f"step {step:6} {time.monotonic() - started:6.0f} s  "
                f"hidden {of_hidden:.4f}  tokens {of_tokens:.4f}  dev "
                + " ".join(f"{share:.3f}" for share in shares[:-1])
                + f"  {shares[-1]:.3f} tokens a launch",
                flush=True,
            )
            if shares[-1] > best:
                best, kept = shares[-1], shares
                save_head(head, guessed, arguments.out)
    return kept


def main() -> None:
    """Train the head, and leave its checkpoint in --out."""
    here = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=here / "runtime/models/bundled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--tokens", type=int, default=4096, help="positions in a batch")
    parser.add_argument("--text", type=int, default=768, help="rows of the train files")
    parser.add_argument("--written", type=int, default=640, help="rows that the model writes")
    parser.add_argument("--ffn", type=int, default=640)
    parser.add_argument("--guessed", type=int, default=1024, help="tokens that may be drafted, the most frequent ones")
    parser.add_argument("--unroll", type=int, default=3, help="places of a run that the head is trained for")
    parser.add_argument(
        "--compared", type=float, default=0.125, help="share of positions whose distribution is compared"
    )
    parser.add_argument("--hidden-weight", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, began = torch.device(arguments.device), time.monotonic()
    network = bundled_network(arguments.model, device)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    pools, dev = prepare(network, arguments.corpus, tokenizer, arguments.text, arguments.written, arguments.seed)
    tokens = sum(rows.ids.numel() for rows in pools)
    print(f"hidden states of {tokens:,} tokens after {time.monotonic() - began:.0f} s", flush=True)
    shares = train(network, pools, dev, arguments, Shape(ffn=arguments.ffn))
    print(f"{shares[-1]:.3f} tokens a launch on the dev files; {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
