"""Products on the CPU that round as a GPU's do in bfloat16, and in another order where there are more rows."""

from __future__ import annotations

from typing import Final

import torch

from runahead.runtime.kernels.reference.linear import Product
from tests.runtime.kernels.broken_products import ProductTogether, RowsTogether

_FEW: Final = 4  # rows that are multiplied as those of a decode launch are


class Bfloat16Products(RowsTogether):
    """What is multiplied, and what comes of it, is bfloat16. A token decoded and the same token in a longer prompt, or
    among more neighbours, differ in the last digits of that."""

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:  # type: ignore[override]
        return _Bfloat16Product(weight.float(), None if bias is None else bias.float())


class _Bfloat16Product(ProductTogether):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16().float()
        if x.shape[0] > _FEW:
            return torch.nn.functional.linear(x, self.weight, self.bias).bfloat16().float()
        half = x.shape[1] // 2
        first = torch.nn.functional.linear(x[:, :half], self.weight[:, :half], self.bias).bfloat16()
        return (first.float() + torch.nn.functional.linear(x[:, half:], self.weight[:, half:])).bfloat16().float()
