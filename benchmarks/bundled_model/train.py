"""Train the bundled model, or a hybrid on the same text.

    python -m benchmarks.bundled_model.corpus --out corpus.json
    python -m benchmarks.bundled_model.train --corpus corpus.json --out runtime/models/bundled
    python -m benchmarks.bundled_model.train --corpus corpus.json --out FOLDER --kind hybrid \\
        --teacher runtime/models/bundled

The text is small (two million tokens), so larger networks are trained first and the bundled one learns from their
averaged distribution as well as from the text. `--teacher FOLDER` takes a checkpoint of the bundled model instead. The
checkpoint kept is the best on the dev files; to be served it needs the bundled model's tokenizer files beside it. With
`--state FOLDER` a run goes on where another process left it; the order of the text begins anew then. The options that
the bundled checkpoints were made with stand in their card, runtime/models/bundled/README.md.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.bundled_model.batches import PIECE_TOKENS, STREAM_TOKENS, Batches, Encoded, encode
from benchmarks.bundled_model.hybrid_network import HybridNetwork, HybridShape
from benchmarks.bundled_model.muon import BatchedMuon
from benchmarks.bundled_model.network import Network, Shape
from benchmarks.bundled_model.tokenizer import end_token
from benchmarks.bundled_model.training_state import STATE, Progress, load_state, save_state

AnyNetwork = Network | HybridNetwork

WARMUP = 0.05
CHECKS = 12  # how often the dev files are scored
KINDS: dict[str, Shape | HybridShape] = {"dense": Shape(), "hybrid": HybridShape()}
TEACHER = Shape(hidden=512, layers=8, heads=8, kv_heads=4, ffn=1408)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one network is trained. `tokens` is the batch; `distil` the weight of the teachers' distribution, `balance`
    that of how unevenly experts are chosen.

    Training ends after `steps`, after `limit_s` seconds, or when `time.monotonic()` is `until`, whichever is soonest;
    the learning rate follows that. Seconds begin when everything is compiled.
    """

    name: str
    shape: Shape | HybridShape
    steps: int
    tokens: int
    dropout: float
    muon_rate: float
    adam_rate: float
    weight_decay: float
    piece_share: float
    distil: float = 0.0
    balance: float = 0.0
    seed: int = 0
    limit_s: float = math.inf
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Machine:
    """What a network is trained on. bfloat16: products are computed in it. compiles: layers are compiled."""

    device: torch.device
    bfloat16: bool
    compiles: bool

    def products(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def loss(self) -> Callable[[Tensor, Tensor, Tensor | None, float], Tensor]:
        return compiled_loss() if self.compiles else loss_of


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


def network_of(shape: Shape | HybridShape, dropout: float) -> AnyNetwork:
    return HybridNetwork(shape, dropout) if isinstance(shape, HybridShape) else Network(shape, dropout)


def optimizers_of(network: AnyNetwork, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the products inside the layers, AdamW for the embedding and (without decay) all else."""
    inside: list[nn.Parameter] = []
    embedding: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2 and any(part in name for part in network.by_muon):
            inside.append(parameter)
        else:
            (embedding if "embed" in name else others).append(parameter)
    return [
        BatchedMuon(inside, recipe.muon_rate, recipe.weight_decay),
        torch.optim.AdamW(
            [{"params": embedding, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
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
def bits_per_byte(network: AnyNetwork, windows: Tensor, text_bytes: int, batch: int, machine: Machine) -> float:
    """Bits a UTF-8 byte, end tokens paid for. Every batch has `batch` rows, since layers compile for one shape."""
    nats = 0.0
    network.eval()
    for chunk in windows.split(batch):
        ids = F.pad(chunk, (0, 0, 0, batch - len(chunk)), value=-1)
        with machine.products():
            logits, _ = network(ids[:, :-1].clamp(min=0))
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


@cache
def compiled_loss() -> Callable[[Tensor, Tensor, Tensor | None, float], Tensor]:
    """`loss_of` as a few kernels: in pieces it reads and writes a batch's logits some twenty times."""
    return torch.compile(loss_of, dynamic=False)


def train_step(
    network: AnyNetwork,
    teachers: list[AnyNetwork],
    optimizers: list[torch.optim.Optimizer],
    ids: Tensor,
    recipe: Recipe,
    machine: Machine,
) -> Tensor:
    """One update from ids [rows, length + 1]; returns the loss, not yet waited for."""
    loss = learn(network, teachers, ids, recipe, machine)
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def learn(network: AnyNetwork, teachers: list[AnyNetwork], ids: Tensor, recipe: Recipe, machine: Machine) -> Tensor:
    """Leave the gradients of ids [rows, length + 1] with the parameters; returns the loss, not yet waited for."""
    with machine.products():
        with torch.no_grad():
            votes = [F.softmax(teacher(ids[:, :-1])[0].float(), dim=-1) for teacher in teachers]
        logits, uneven = network(ids[:, :-1])
    wanted = torch.stack(votes).mean(0) if len(votes) > 1 else votes[0] if votes else None
    loss = machine.loss()(logits, ids[:, 1:], wanted, recipe.distil)
    (loss + recipe.balance * uneven).backward()
    return loss.detach()


def compile_all(
    network: AnyNetwork, teachers: list[AnyNetwork], windows: Tensor, data: Data, recipe: Recipe, machine: Machine
) -> None:
    """Compile for both lengths of a batch and for the dev files, before the clock by which the learning rate goes."""
    for length in (PIECE_TOKENS, STREAM_TOKENS):
        ids = torch.zeros(recipe.tokens // length, length + 1, dtype=torch.int64, device=machine.device)
        learn(network, teachers, ids, recipe, machine)
    network.zero_grad()
    bits_per_byte(network, windows, data.dev.bytes, recipe.tokens // STREAM_TOKENS, machine)
    torch.manual_seed(recipe.seed)


def train(
    recipe: Recipe, data: Data, teachers: list[AnyNetwork], machine: Machine, out: Path | None, state: Path | None
) -> AnyNetwork:
    """Train one network; returns it with its best weights on the dev files. With `out`, each better one is saved; with
    `state`, where the run is, and a run that has left something there goes on from it."""
    torch.manual_seed(recipe.seed)
    device = machine.device
    network = network_of(recipe.shape, recipe.dropout).to(device)
    if machine.compiles:
        network.compile_layers()
    optimizers = optimizers_of(network, recipe)
    full_rates = [recipe.muon_rate, recipe.adam_rate]
    at, best_weights = Progress(recipe.name, 0, 0.0, math.inf), network.state_dict()
    if state is not None and (state / STATE).exists():
        at, best_weights = load_state(state, network, optimizers)
        print(f"{recipe.name}: goes on from step {at.step} after {at.seconds:.0f} s, best {at.best:.4f} bits/byte")
    batches = iter(Batches(data.train, recipe.tokens, recipe.piece_share, recipe.seed + at.step, device))
    windows, rows = windows_of(data.dev.files, device), recipe.tokens // STREAM_TOKENS
    parameters = sum(p.numel() for p in network.parameters())
    epoch = sum(len(file) for file in data.train[0].files)
    epochs = recipe.steps * recipe.tokens / epoch
    print(f"{recipe.name}: {parameters:,} parameters, at most {epochs:.0f} epochs of {epoch:,} tokens")
    if machine.compiles:
        before = time.monotonic()
        compile_all(network, teachers, windows, data, recipe, machine)
        print(f"{recipe.name}: compiled in {time.monotonic() - before:.0f} s", flush=True)
    started = time.monotonic() - at.seconds
    recipe = replace(recipe, limit_s=max(1e-3, min(recipe.limit_s, recipe.until - started)))
    step, best, progress = at.step, at.best, _share_done(recipe, at.step, at.seconds)
    checked = int(progress * CHECKS)
    while progress < 1:
        for optimizer, full in zip(optimizers, full_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate_at(progress)
        loss = train_step(network, teachers, optimizers, next(batches), recipe, machine)
        step += 1
        spent = time.monotonic() - started
        progress = _share_done(recipe, step, spent)
        if int(progress * CHECKS) > checked:
            checked = int(progress * CHECKS)
            dev = bits_per_byte(network, windows, data.dev.bytes, rows, machine)
            print(f"{recipe.name} step {step:6} {spent:6.1f} s  loss {loss:.4f}  dev {dev:.4f} bits/byte", flush=True)
            if dev < best:
                best, best_weights = dev, {name: value.clone() for name, value in network.state_dict().items()}
                if out is not None:
                    network.save(out, data.end_of_text)
            if state is not None:
                save_state(state, Progress(recipe.name, step, spent, best), network, optimizers, best_weights)
    network.load_state_dict(best_weights)
    print(
        f"{recipe.name}: best {best:.4f} bits/byte on the dev files after {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return network


def _share_done(recipe: Recipe, step: int, seconds: float) -> float:
    return min(1.0, max(step / recipe.steps, seconds / recipe.limit_s))


def prepare(corpus: Path, tokenizer_file: Path, variants: int, merge_dropout: float) -> Data:
    """Encode the corpus once plainly and `variants` times with merges skipped at random."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    plain = encode(corpus, "train", tokenizer)
    others = [encode(corpus, "train", tokenizer, merge_dropout) for _ in range(variants)]
    return Data([plain, *others], encode(corpus, "dev", tokenizer), end_token(tokenizer))


def _arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=here / "runtime/models/bundled/tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, help="for products (on a GPU)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="layers (on a GPU)")
    parser.add_argument("--threads", type=int, help="of torch on the CPU (as many as it takes)")
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--state", type=Path, help="folder: where the run is, and from where it goes on")
    parser.add_argument("--teacher", type=Path, action="append", help="a checkpoint of the bundled model that teaches")
    parser.add_argument("--teachers", type=int, default=2, help="to train, where no checkpoint teaches")
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
    parser.add_argument(
        "--whole", type=float, default=math.inf, help="seconds that encoding, compiling, training may take"
    )
    parser.add_argument("--distil", type=float, default=0.7)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of how unevenly experts are chosen")
    parser.add_argument("--piece-share", type=float, default=0.5)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--merge-dropout", type=float, default=0.1)
    return parser.parse_args()


def main() -> None:
    """Train the teachers, then the bundled network, and leave its checkpoint in --out."""
    arguments = _arguments()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # one entry for each network, batch shape and mode
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    machine = Machine(
        device,
        on_gpu if arguments.bfloat16 is None else arguments.bfloat16,
        on_gpu if arguments.compile is None else arguments.compile,
    )
    began = time.monotonic()
    data = prepare(arguments.corpus, arguments.tokenizer, arguments.variants, arguments.merge_dropout)
    print(f"encoded {1 + arguments.variants} times in {time.monotonic() - began:.0f} s", flush=True)
    student = Recipe(
        name=arguments.kind,
        shape=KINDS[arguments.kind],
        steps=arguments.steps,
        tokens=arguments.tokens,
        dropout=arguments.dropout,
        muon_rate=arguments.rate,
        adam_rate=arguments.rate,
        weight_decay=arguments.decay,
        piece_share=arguments.piece_share,
        distil=arguments.distil,
        balance=arguments.balance,
        limit_s=arguments.seconds,
        until=began + arguments.whole,
    )
    teachers: list[AnyNetwork] = [Network.load(folder).to(device) for folder in arguments.teacher or ()]
    if machine.compiles:
        for teacher in teachers:
            teacher.compile_layers()
    for number in range(1, arguments.teachers + 1 if not teachers else 1):
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
            until=math.inf,
        )
        teachers.append(train(recipe, data, [], machine, None, None).eval())
    if arguments.steps:
        train(student, data, teachers, machine, arguments.out, arguments.state)


if __name__ == "__main__":
    main()
