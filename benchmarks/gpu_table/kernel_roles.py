"""What a kernel of a decode launch does, told from its name, and where the name does not say it, from its place.

No other file knows kernels by their names. A kernel with a new name is `other` until a line here names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

OTHER: Final = "other"
PRODUCT: Final = "product"  # a matrix product, which one can't be told
PRODUCTS_OF_A_LAYER: Final = ("qkv", "o", "gate_up", "down")  # in the order in which they run
HEAD: Final = "head"

# The first line that matches counts, so that a fused kernel is named after what reads the most bytes.
_BY_NAME: Final = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("marks", r"^_?(start|sampled|ended)_kernel"),
        ("experts", r"expert|^_?(route|list|sum)_kernel"),
        ("states", r"mamba2|delta|convolve|keep_channels|gated_norm"),
        ("qkv", r"qkv"),
        ("gate_up", r"gate_?up(?!.*silu_mul)|(^|_)gu_kernel"),
        ("down", r"(^|_)down(_|$)"),
        (HEAD, r"lm_?head|(^|_)head_kernel|(^|_)logits_kernel"),
        ("o", r"(^|_)o_(proj|kernel|residual)|output_projection"),
        ("attention", r"atten|flash|(^|_)(decode|split|combine)_kernel"),
        ("rotary", r"rotate|rotary|rope"),
        ("epilogue", r"^_?(finish|add|quantize)_kernel"),
        ("norm", r"norm"),
        ("activation", r"silu|gated_mul|activation"),
        (PRODUCT, r"nvjet|gemm|cutlass|xmma|skinny|matmul|linear|product|(^|_)(chains|groups|split_k)_kernel"),
        ("apply", r"queries|(^|_)apply|targets"),
        ("sampling", r"scan|draw|finish|(^|_)(edit|guess|bracket)_kernel|penal|logprob|(^|_)top_|sampl|gumbel|advance"),
        ("finite", r"finite"),
        ("embedding", r"embed|begin|indexselect|index_select"),
        ("copy", r"memcpy|memset|copy"),
    )
)


def role_of(name: str) -> str:
    """By its name alone."""
    name = name.lower()
    return next((role for role, pattern in _BY_NAME if pattern.search(name)), OTHER)


def roles_of(names: Sequence[str], layers: int) -> list[str]:
    """Return the roles of one launch's kernels, in the order of execution. layers: of the model.

    Where a layer has as many products as it should, their order tells them apart, and the first one behind the
    layers is the head's.
    """
    roles = [role_of(name) for name in names]
    span = _layers_in(roles, layers)
    if span is None:
        return roles
    first, period = span
    places = [place for place in range(first, first + period) if roles[place] == PRODUCT]
    if len(places) == len(PRODUCTS_OF_A_LAYER):
        for role, place in zip(PRODUCTS_OF_A_LAYER, places, strict=True):
            roles[place : first + layers * period : period] = [role] * layers
    behind = first + layers * period
    for place in range(behind, len(roles)):
        if roles[place] == PRODUCT:
            roles[place] = HEAD
            break
    return roles


def _layers_in(roles: Sequence[str], layers: int) -> tuple[int, int] | None:
    """Where the first layer begins and how many kernels it has: the longest stretch that is repeated once a layer."""
    for period in range(len(roles) // layers, 0, -1):
        for first in range(len(roles) - layers * period + 1):
            end = first + (layers - 1) * period
            if roles[first:end] == roles[first + period : end + period]:
                return first, period
    return None
