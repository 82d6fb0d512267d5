"""What the draft head is trained on: text, what the bundled model itself writes, and the hidden states of both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.bundled_model.completions import head_of
from benchmarks.bundled_model.network import Layer, Network

TEMPERATURE = 0.8  # of every second one; the others are greedy


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one length. ids: int64 [rows, T]; hidden: bfloat16 [rows, T, hidden], the model's after its last norm."""

    ids: Tensor
    hidden: Tensor


def bundled_network(folder: Path, device: torch.device) -> Network:
    """The bundled model as a network that is not trained any more."""
    return Network.load(folder).to(device).requires_grad_(False)


def heads_of(corpus: Path, split: str) -> list[str]:
    """Heads of all functions and methods of a split of the corpus, each once, in order."""
    entries = json.loads(corpus.read_text())[split]
    texts = [text for entry in entries for text in (*entry["definitions"], *entry["methods"])]
    return list(dict.fromkeys(head for text in texts if (head := head_of(text)) is not None))


def completions(
    network: Network, tokenizer: Tokenizer, heads: list[str], count: int, length: int, batch: int, seed: int
) -> Tensor:
    """int64 [count, length]: heads, drawn anew each time round, and what the model writes behind them, half of a row or
    more. An end token ends nothing: another definition follows. Every second row is greedy."""
    chance, device = random.Random(seed), network.cos.device
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += chance.sample(heads, len(heads))
    prompts = [encoding.ids[: length // 2] for encoding in tokenizer.encode_batch(drawn[:count])]
    rows = torch.full((count, length), -1)
    for row, ids in zip(rows, prompts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    noise = torch.Generator(device).manual_seed(seed)
    return torch.cat([_completed(network, part.to(device), noise) for part in rows.split(batch)])


@torch.no_grad()
def _completed(network: Network, rows: Tensor, noise: torch.Generator) -> Tensor:
    """The rows, int64 [rows, T], with tokens where they have -1. The arithmetic is bfloat16."""
    count, length = rows.shape
    model = network.model.to(torch.bfloat16)
    shape, width = network.shape, network.cos.shape[1]
    shaped = (shape.layers, count, shape.kv_heads, length, width)
    keys = torch.zeros(shaped, dtype=torch.bfloat16, device=rows.device)
    values = torch.zeros_like(keys)
    greedy = torch.arange(count, device=rows.device) % 2 == 0
    for at in range(length - 1):
        cos, sin = network.cos[at].bfloat16(), network.sin[at].bfloat16()

        def rotated(y: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-second, first), dim=-1) * sin

        x = model.embed_tokens(rows[:, at])
        for number, layer in enumerate(cast(list[Layer], model.layers)):
            normed, mixer = layer.input_layernorm(x), layer.self_attn
            q = rotated(mixer.q_proj(normed).view(count, shape.heads, 1, width))
            keys[number, :, :, at] = rotated(mixer.k_proj(normed).view(count, shape.kv_heads, width))
            values[number, :, :, at] = mixer.v_proj(normed).view(count, shape.kv_heads, width)
            # Heads that share keys are as many queries of one head.
            q = q.view(count, shape.kv_heads, mixer.groups, width)
            mixed = F.scaled_dot_product_attention(q, keys[number, :, :, : at + 1], values[number, :, :, : at + 1])
            x = x + mixer.o_proj(mixed.reshape(count, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = F.linear(model.norm(x), model.embed_tokens.weight).float()
        drawn = torch.rand(logits.shape, generator=noise, device=rows.device).log().neg().log().neg()
        said = torch.where(greedy[:, None], logits, logits / TEMPERATURE + drawn).argmax(-1)
        rows[:, at + 1] = torch.where(rows[:, at + 1] < 0, said, rows[:, at + 1])
    network.model.float()
    return rows


@torch.no_grad()
def with_hidden(network: Network, ids: Tensor, batch: int) -> Rows:
    """The rows and the model's hidden states, which are computed once."""
    length, hidden = ids.shape[1], []
    for part in ids.split(batch):
        with torch.autocast(ids.device.type, torch.bfloat16):
            hidden.append(network.model(part, network.cos[:length], network.sin[:length]).bfloat16())
    return Rows(ids, torch.cat(hidden))


def frequent(pools: list[Rows], vocabulary: int, count: int) -> Tensor:
    """So many tokens, int64 [count] in ascending order: the most frequent ones, where every pool counts as much."""
    shares = torch.zeros(vocabulary, dtype=torch.float64)
    for rows in pools:
        shares += torch.bincount(rows.ids.flatten().cpu(), minlength=vocabulary) / rows.ids.numel()
    return shares.topk(count).indices.sort().values.to(pools[0].ids.device)


def batches(pools: list[Rows], tokens: int, seed: int) -> Iterator[Rows]:
    """Endless batches of about so many tokens, each of one pool, which is chosen as often as it has tokens. Each pool
    is gone through in random order, again and again."""
    chance = random.Random(seed)
    orders: list[list[int]] = [[] for _ in pools]
    while True:
        pool = chance.choices(range(len(pools)), [rows.ids.numel() for rows in pools])[0]
        ids, order = pools[pool].ids, orders[pool]
        count = max(1, tokens // ids.shape[1])
        if len(order) < count:
            order[:] = chance.sample(range(len(ids)), len(ids))
        taken = torch.tensor([order.pop() for _ in range(min(count, len(order)))], device=ids.device)
        yield Rows(ids[taken], pools[pool].hidden[taken])
