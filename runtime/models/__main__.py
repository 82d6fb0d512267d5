"""`python -m runahead.runtime.models` prints the architectures that are served, and models known to be of them."""

from __future__ import annotations

from runahead.runtime.models.registry import ARCHITECTURES

if __name__ == "__main__":
    width = max(map(len, ARCHITECTURES))
    for found in ARCHITECTURES.values():
        print(f"{found.name:{width}}  {found.models}")
