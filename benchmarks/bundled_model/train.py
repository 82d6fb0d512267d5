"""Train the bundled model.

    python -m benchmarks.bundled_model.corpus --out corpus.json
    python -m benchmarks.bundled_model.train --corpus corpus.json --out runtime/models/bundled

The text is small (two million tokens), so larger networks are trained first and the bundled one learns from their
averaged distribution as well as from the text. The checkpoint kept is the best on the dev files.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.bundled_model.batches import STREAM_TOKENS, Batches, Encoded, encode
from benchmarks.bundled_model.network import Network, Shape, save_checkpoint
from benchmarks.bundled_model.tokenizer import end_token

WARMUP = 0.05
CHECKS = 12  # how often the dev files are scored
BUNDLED = Shape()
TEACHER = Shape(hidden=512, layers=8, heads=8, kv_heads=4, ffn=1408)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one network is trained. `tokens` is the batch; `distil` the weight of the teachers' distribution.

    Training ends after `steps`, or after `limit_s` seconds if that is sooner; the learning rate follows either.
    """

    name: str
    shape: Shape
    steps: int
    tokens: int
    dropout: float
    muon_rate: float
    adam_rate: float
    weight_decay: float
    piece_share: float
    distil: float = 0.0
    seed: int = 0
    limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Data:
    """Encodings of the train files (the first is the plain one) and of the dev files."""

    train: list[Encoded]
    dev: Encoded
    end_of_text: int


def rate_at(progress: float) -> float:
    """The share of the full learning rate: over the first 5 % up, then a cosine down to nothing."""
    if progress < WARMUP:
        return (progress + 1e-3) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def optimizers_of(network: Network, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and (without decay) the norms."""
    inside = [p for name, p in network.named_parameters() if p.dim() == 2 and "embed" not in name]
    embedding = [p for name, p in network.named_parameters() if "embed" in name]
    norms = [p for p in network.parameters() if p.dim() == 1]
    return [
        torch.optim.Muon(inside, lr=recipe.muon_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embedding, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            lr=recipe.adam_rate,
            betas=(0.9, 0.95),
        ),
    ]


def windows_of(files: list[list[int]], device: torch.device) -> Tensor:
    """The files cut into windows of the context: ids [windows, STREAM_TOKENS + 1], padded at the end with -1."""
    rows = [file[at : at + STREAM_TOKENS + 1] for file in files for at in range(0, len(file) - 1, STREAM_TOKENS)]
    padded = torch.full((len(rows), STREAM_TOKENS + 1), -1)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return padded.to(device)


@torch.no_grad()
def bits_per_byte(network: Network, windows: Tensor, text_bytes: int, batch: int) -> float:
    """Bits a UTF-8 byte, end tokens paid for. Every batch has `batch` rows, since layers compile for one shape."""
    nats = 0.0
    network.eval()
    for chunk in windows.split(batch):
        ids = F.pad(chunk, (0, 0, 0, batch - len(chunk)), value=-1)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            logits = network(ids[:, :-1].clamp(min=0))
        nats += float(
            F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=-1, reduction="sum")
        )
    network.train()
    return nats / math.log(2) / text_bytes


def loss_of(logits: Tensor, targets: Tensor, wanted: Tensor | None, distil: float) -> Tensor:
    """Cross entropy to the text and, with the share `distil`, to the teachers' distribution `wanted`."""
    logs = F.log_softmax(logits.float(), dim=-1)
    text = -logs.gather(-1, targets[..., None]).mean()
    if wanted is None:
        return text
    return (1 - distil) * text - distil * (wanted * logs).sum(-1).mean()


def train_step(
    network: Network, teachers: list[Network], optimizers: list[torch.optim.Optimizer], ids: Tensor, distil: float
) -> Tensor:
    """One update from ids [rows, length + 1]; returns the loss, not yet waited for."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        with torch.no_grad():
            votes = [F.softmax(teacher(ids[:, :-1]).float(), dim=-1) for teacher in teachers]
        logits = network(ids[:, :-1])
    wanted = torch.stack(votes).mean(0) if votes else None
    loss = loss_of(logits, ids[:, 1:], wanted, distil)
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def train(recipe: Recipe, data: Data, teachers: list[Network], device: torch.device, out: Path | None) -> Network:
    """Train one network; returns it with its best weights on the dev files. With `out`, each better one is saved."""
    torch.manual_seed(recipe.seed)
    network = Network(recipe.shape, recipe.dropout).to(device)
    if device.type == "cuda":
        network.compile_layers()
    optimizers = optimizers_of(network, recipe)
    full_rates = [recipe.muon_rate, recipe.adam_rate]
    batches = iter(Batches(data.train, recipe.tokens, recipe.piece_share, recipe.seed, device))
    windows, rows = windows_of(data.dev.files, device), recipe.tokens // STREAM_TOKENS
    best, best_weights = math.inf, network.state_dict()
    parameters = sum(p.numel() for p in network.parameters())
    epoch = sum(len(file) for file in data.train[0].files)
    print(f"{recipe.name}: {parameters:,} parameters, {recipe.steps * recipe.tokens / epoch:.0f} epochs of {epoch:,}")
    started = time.monotonic()
    step, checked, progress = 0, 0, 0.0
    while progress < 1:
        for optimizer, full in zip(optimizers, full_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate_at(progress)
        loss = train_step(network, teachers, optimizers, next(batches), recipe.distil)
        step += 1
        spent = time.monotonic() - started
        progress = min(1.0, max(step / recipe.steps, spent / recipe.limit_s))
        if int(progress * CHECKS) > checked:
            checked = int(progress * CHECKS)
            dev = bits_per_byte(network, windows, data.dev.bytes, rows)
            print(f"{recipe.name} step {step:6} {spent:6.1f} s  loss {loss:.4f}  dev {dev:.4f} bits/byte", flush=True)
            if dev < best:
                best, best_weights = dev, {name: value.clone() for name, value in network.state_dict().items()}
                if out is not None:
                    save_checkpoint(network, out, data.end_of_text)
    network.load_state_dict(best_weights)
    print(
        f"{recipe.name}: best {best:.4f} bits/byte on the dev files after {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return network


def prepare(corpus: Path, tokenizer_file: Path, variants: int, merge_dropout: float) -> Data:
    """Encode the corpus once plainly and `variants` times with merges skipped at random."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    plain = encode(corpus, "train", tokenizer)
    others = [encode(corpus, "train", tokenizer, merge_dropout) for _ in range(variants)]
    return Data([plain, *others], encode(corpus, "dev", tokenizer), end_token(tokenizer))


def main() -> None:
    """Train the teachers, then the bundled network, and leave its checkpoint in --out."""
    here = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=here / "runtime/models/bundled/tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--teachers", type=int, default=2)
    parser.add_argument("--teacher-steps", type=int, default=1800)
    parser.add_argument("--teacher-dropout", type=float, default=0.25)
    parser.add_argument("--teacher-decay", type=float, default=1.0)
    parser.add_argument("--teacher-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=32768, help="positions in a batch")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--decay", type=float, default=0.2)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="the longest the bundled network may train")
    parser.add_argument("--distil", type=float, default=0.7)
    parser.add_argument("--piece-share", type=float, default=0.5)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--merge-dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # one entry for each network, batch shape and mode
    device = torch.device(arguments.device)
    began = time.monotonic()
    data = prepare(arguments.corpus, arguments.tokenizer, arguments.variants, arguments.merge_dropout)
    print(f"encoded {1 + arguments.variants} times in {time.monotonic() - began:.0f} s", flush=True)
    student = Recipe(
        name="bundled",
        shape=BUNDLED,
        steps=arguments.steps,
        tokens=arguments.tokens,
        dropout=arguments.dropout,
        muon_rate=arguments.rate,
        adam_rate=arguments.rate,
        weight_decay=arguments.decay,
        piece_share=arguments.piece_share,
        distil=arguments.distil,
        limit_s=arguments.seconds,
    )
    teachers: list[Network] = []
    for number in range(1, arguments.teachers + 1):
        recipe = replace(
            student,
            name=f"teacher {number}",
            shape=TEACHER,
            steps=arguments.teacher_steps,
            dropout=arguments.teacher_dropout,
            weight_decay=arguments.teacher_decay,
            muon_rate=arguments.teacher_rate,
            adam_rate=arguments.teacher_rate,
            seed=number,
            limit_s=math.inf,
        )
        teachers.append(train(recipe, data, [], device, None).eval())
    if arguments.steps:
        train(student, data, teachers, device, arguments.out)


if __name__ == "__main__":
    main()
