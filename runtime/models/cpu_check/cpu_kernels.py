"""Chooses row-invariant kernels for this processor when the CPU device starts, before weights are read.

Equal results at all depths require that a row's bits are independent, which depends on the libraries' order of sums,
which they do not promise. So every start tries it on matrices of the served shapes, including a draft head's; for
outputs over a vocabulary, on the first 4,096.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from runahead.runtime.kernels.layer_products import products_of
from runahead.runtime.kernels.ranks import WHOLE, Shard
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import (
    Products,
    RowInvarianceError,
    linear,
    product_ways,
    rows_keep_their_bits,
)
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.self_test import SelfTestReport, self_test
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.models.weights import described, dummy_weights

_ROWS: Final = (1, 3, 16)  # numbers of concurrent sequences in the self-test
_LONGEST: Final = 12  # tokens of most of them; some are four times as long
_FEW: Final = 24  # query tokens of a forward up to which the self-test has compared products with single rows
_WIDEST_HEAD: Final = 4096  # tried outputs of the head: a vocabulary may have a hundred thousand
_WINDOW: Final = 20  # a window shorter than some of the sequences


class NoKernelsError(RuntimeError):
    """No kernels of the CPU device are row-invariant on this machine. The sentence says what was tried."""


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """The outcome of the trial.

    products: the chosen way of computing products. failed: what earlier ways got wrong, after the numbers of threads
        with which none held.
    tokens, forwards, widest_forward: compared by the self-test, see `SelfTestReport`. threads: of torch.
    """

    products: str
    failed: dict[str, str]
    tokens: int
    forwards: int
    widest_forward: int
    threads: int
    seconds: float


def kernels_of(products: str) -> ReferenceKernels:
    """Return kernels by the name of their products (`KernelTrial.products`), tried by another process."""
    return ReferenceKernels(next(way for way in product_ways() if type(way).__name__ == products))


def products_of_a_rank(config: ModelConfig, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return (in, out) of every product of a rank's part; none for a whole model, whose products are tried anyway."""
    return () if ranks == 1 else tuple(_shapes(config, Shard(0, ranks)))


def tried_kernels(
    config: ModelConfig, threads: int, more: Sequence[tuple[int, int]] = (), *, fixed: bool
) -> tuple[ReferenceKernels, KernelTrial]:
    """Choose kernels with this many threads, and unless they are fixed, with half as many, and so on: a library may
    split a sum among many threads by the number of rows, which it can't on one thread.

    torch keeps the number of threads that holds; `KernelTrial.failed` includes the others.

    Raises NoKernelsError with the last trial's message if no number of threads holds.
    """
    failed: dict[str, str] = {}
    while True:
        torch.set_num_threads(threads)
        try:
            kernels, trial = choose_kernels(config, more=more)
            return kernels, replace(trial, failed=failed | trial.failed)
        except NoKernelsError as error:
            if fixed or threads == 1:
                raise
            failed[f"{threads} threads"] = str(error)
        threads //= 2


def choose_kernels(
    config: ModelConfig, ways: Sequence[Products] | None = None, more: Sequence[tuple[int, int]] = ()
) -> tuple[ReferenceKernels, KernelTrial]:
    """Choose the first row-invariant kernels for a model of this shape with torch's current number of threads.

    ways: of computing products, in order of trial; None: all, the fastest first.
    more: (in, out) of further products. Raises NoKernelsError, with each way's failure, if none holds. Other errors,
        such as a lack of memory, are raised unchanged.
    """
    begun = time.perf_counter()
    failed: dict[str, str] = {}
    computed = False
    for products in product_ways() if ways is None else ways:
        lack = _what_is_lacking(products)
        if lack:
            failed[type(products).__name__] = lack
            continue
        computed = True
        kernels = ReferenceKernels(products)
        try:
            report = _try(config, products, kernels, more)
        except RowInvarianceError as error:
            failed[type(products).__name__] = str(error)
            continue
        seconds = round(time.perf_counter() - begun, 3)
        threads = torch.get_num_threads()
        found = KernelTrial(
            type(products).__name__, failed, report.tokens, report.forwards, report.widest_forward, threads, seconds
        )
        return kernels, found
    tried = "; ".join(f"{name}: {sentence}" for name, sentence in failed.items())
    why = (
        "a token's numbers depend on what runs beside it, so a request could get other tokens at another depth. "
        "Another build of torch may add numbers in another order"
        if computed
        else "this build of torch has none of the products that it computes with"
    )
    raise NoKernelsError(f"device cpu can't be served on this machine: {why}. Tried {tried}")


def _what_is_lacking(products: Products) -> str:
    """Return a library's error for these products on 2 by 2 matrices, empty if they work."""
    try:
        linear(products, torch.eye(2), products.pack(torch.eye(2)))
    except (RuntimeError, AttributeError) as error:  # a missing or broken operator
        return str(error) or type(error).__name__
    return ""


def _try(
    config: ModelConfig, products: Products, kernels: ReferenceKernels, more: Sequence[tuple[int, int]]
) -> SelfTestReport:
    """Try one way. Raises RowInvarianceError if a row's bits depend on other rows."""
    small = _small(config)
    beside = [(inputs, min(outputs, _WIDEST_HEAD)) for inputs, outputs in more]
    shapes = list(dict.fromkeys((*_shapes(small), *beside)))
    if not (rows_keep_their_bits(products) and rows_keep_their_bits(products, shapes, few=_FEW)):
        raise RowInvarianceError("a row of a product depends on how many rows there are")
    weights = dummy_weights(small, torch.float32, torch.device("cpu"), kernels.pack_weight)
    decoder = Decoder(small, weights, kernels, min(4 * _LONGEST, small.max_position_embeddings))
    return self_test(decoder, _ROWS, (torch.get_num_threads(),), _LONGEST)


def _small(config: ModelConfig) -> ModelConfig:
    """Return the model with one layer of each kind at full width."""
    small: ModelConfig = ARCHITECTURES[config.architecture].small(config, _WINDOW)
    return replace(small, vocab_size=min(config.vocab_size, _WIDEST_HEAD))


def _shapes(config: ModelConfig, shard: Shard = WHOLE) -> list[tuple[int, int]]:
    """Return (in, out) of every distinct product of a model, or of a rank's part."""
    model = described(config, shard)
    weights = [linear.weight for layer in model.layers for linear in products_of(layer)]
    return list(dict.fromkeys((weight.shape[1], weight.shape[0]) for weight in (*weights, model.lm_head)))
