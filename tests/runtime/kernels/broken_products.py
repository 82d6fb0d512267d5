"""Products that break the promise of the CPU's kernels, each in its own way."""

from __future__ import annotations

import torch

from runahead.runtime.kernels.reference.linear import OneDnnProducts, Product


class RowsTogether(OneDnnProducts):
    """Products that depend on the number of rows: the sum is taken from its end where there are more than two."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:  # type: ignore[override]
        return ProductTogether(weight, bias)


class ProductTogether:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def write(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        out.copy_(self.of(x[0]))

    def add(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        out.add_(self.of(x[0]))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            return torch.nn.functional.linear(x.flip(1), self.weight.flip(1), self.bias)
        return torch.nn.functional.linear(x, self.weight, self.bias)


class AddedTogether(OneDnnProducts):
    """Right wherever a product is written, and dependent on the number of rows where one is added."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:  # type: ignore[override]
        return ProductAddedTogether(weight, bias)


class ProductAddedTogether(ProductTogether):
    def write(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        for row, result in zip(x[0].split(1), out.split(1), strict=True):
            result.copy_(torch.nn.functional.linear(row, self.weight, self.bias))


class NotBuilt(OneDnnProducts):
    """A library that this torch was built without."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this build has no such product")


class TooLarge(RowsTogether):
    """Products that are there, and for whose larger matrices there is no memory."""

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:  # type: ignore[override]
        return OutOfMemory(weight, bias)


class OutOfMemory(ProductTogether):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.numel() > 1000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().of(x)


class ThreadsTogether(RowsTogether):
    """Products that depend on the number of rows where more than `holds` threads share them."""

    holds = 3

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:  # type: ignore[override]
        return ProductTogether(weight, bias) if torch.get_num_threads() > self.holds else ProductApart(weight, bias)


class ProductApart(ProductAddedTogether):
    def add(self, x: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        found = torch.empty_like(out)
        self.write(x, found)
        out.add_(found)
