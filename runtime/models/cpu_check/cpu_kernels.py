"""Which kernels keep rows apart on this processor: tried when the CPU device starts, before weights are read.

Equality of all depths stands on a row's bits being its own, and that on the order in which libraries add numbers, which
they do not promise. So every start tries it, on matrices of the shapes that will be served, those of a draft head too;
of a matrix that has an output for each token of a vocabulary, on the first 4,096 outputs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from runahead.runtime.kernels.layer_products import products_of
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import (
    Products,
    RowInvarianceError,
    linear,
    product_ways,
    rows_keep_their_bits,
)
from runahead.runtime.kernels.share import WHOLE, Share
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.self_test import SelfTestReport, self_test
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.models.weights import described, dummy_weights

_ROWS: Final = (1, 3, 16)  # sequences that run together in the self-test
_LONGEST: Final = 12  # tokens of most of them; some are four times as long
_FEW: Final = 24  # query tokens of a forward for which the self-test has compared products with those of one row
_WIDEST_HEAD: Final = 4096  # outputs of the head that are tried: a vocabulary may have a hundred thousand
_WINDOW: Final = 20  # a window that some of the sequences outgrow


class NoKernelsError(RuntimeError):
    """No kernels of the CPU device keep rows apart on this machine. The sentence says what was tried."""


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """What was found at the start.

    products: the way of computing products that is taken. failed: those tried before it, and what each got wrong, and
    before these the numbers of threads with which none held.
    tokens, forwards, widest_forward: what the self-test compared, as `SelfTestReport`. threads: of torch.
    """

    products: str
    failed: dict[str, str]
    tokens: int
    forwards: int
    widest_forward: int
    threads: int
    seconds: float


def kernels_of(products: str) -> ReferenceKernels:
    """Kernels by the name of their products, as `KernelTrial.products` has it: tried by another process."""
    return ReferenceKernels(next(way for way in product_ways() if type(way).__name__ == products))


def products_of_a_rank(config: ModelConfig, ranks: int) -> tuple[tuple[int, int], ...]:
    """(in, out) of every product of a rank's part; none where the model is whole, whose products are tried anyway."""
    return () if ranks == 1 else tuple(_shapes(config, Share(0, ranks)))


def tried_kernels(
    config: ModelConfig, threads: int, more: Sequence[tuple[int, int]] = (), *, fixed: bool
) -> tuple[ReferenceKernels, KernelTrial]:
    """As `choose_kernels` with so many threads if they are fixed, else as `choose_kernels_and_threads`."""
    if not fixed:
        return choose_kernels_and_threads(config, threads, more)
    torch.set_num_threads(threads)
    return choose_kernels(config, more=more)


def choose_kernels_and_threads(
    config: ModelConfig, most: int, more: Sequence[tuple[int, int]] = ()
) -> tuple[ReferenceKernels, KernelTrial]:
    """As `choose_kernels`, with `most` threads, or half as many, and so on, as far as it takes: a library that shares a
    sum out among many threads may do so by the number of rows, and on one thread has nobody to share with.

    torch has the number of threads then that was found to hold; `KernelTrial.failed` has the others, too.

    Raises NoKernelsError, in the words of the last trial, where not even one thread holds.
    """
    failed: dict[str, str] = {}
    for threads in (most >> halved for halved in range(most.bit_length())):
        torch.set_num_threads(threads)
        try:
            kernels, trial = choose_kernels(config, more=more)
        except NoKernelsError as error:
            if threads == 1:
                raise
            failed[f"{threads} threads"] = str(error)
            continue
        return kernels, replace(trial, failed=failed | trial.failed)
    raise ValueError(f"{most} threads compute nothing")


def choose_kernels(
    config: ModelConfig, ways: Sequence[Products] | None = None, more: Sequence[tuple[int, int]] = ()
) -> tuple[ReferenceKernels, KernelTrial]:
    """The first kernels that keep rows apart for a model of this shape, with as many threads as torch has now.

    ways: of computing products, in the order in which they are tried; None takes all that there are, the fastest first.
    more: (in, out) of products that are computed with them beside the model's own.
    Raises NoKernelsError, with what each way got wrong, where none holds. Whatever else goes wrong, for want of
    memory for instance, says nothing about rows and is raised as it is.
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
    """What a library says that does not have these products, tried on one of 2 by 2; empty where it has them."""
    try:
        linear(products, torch.eye(2), products.pack(torch.eye(2)))
    except (RuntimeError, AttributeError) as error:  # an operator that does not work, or is not there
        return str(error) or type(error).__name__
    return ""


def _try(
    config: ModelConfig, products: Products, kernels: ReferenceKernels, more: Sequence[tuple[int, int]]
) -> SelfTestReport:
    """Raises RowInvarianceError where a row's bits depend on other rows."""
    small = _small(config)
    beside = [(inputs, min(outputs, _WIDEST_HEAD)) for inputs, outputs in more]
    shapes = list(dict.fromkeys((*_shapes(small), *beside)))
    if not (rows_keep_their_bits(products) and rows_keep_their_bits(products, shapes, few=_FEW)):
        raise RowInvarianceError("a row of a product depends on how many rows there are")
    weights = dummy_weights(small, torch.float32, torch.device("cpu"), kernels.pack_weight)
    decoder = Decoder(small, weights, kernels, min(4 * _LONGEST, small.max_position_embeddings))
    return self_test(decoder, _ROWS, (torch.get_num_threads(),), _LONGEST)


def _small(config: ModelConfig) -> ModelConfig:
    """One layer of each kind, all of them as wide as the model's."""
    small: ModelConfig = ARCHITECTURES[config.architecture].small(config, _WINDOW)
    return replace(small, vocab_size=min(config.vocab_size, _WIDEST_HEAD))


def _shapes(config: ModelConfig, share: Share = WHOLE) -> list[tuple[int, int]]:
    """(in, out) of every product of a model, or a rank's part of it, each once."""
    model = described(config, share)
    weights = [linear.weight for layer in model.layers for linear in products_of(layer)]
    return list(dict.fromkeys((weight.shape[1], weight.shape[0]) for weight in (*weights, model.lm_head)))
