"""`python -m runahead.runtime.models` prints the architectures that are served, what their layers may be, and models
that are known to be of them."""

from __future__ import annotations

from runahead.runtime.models.registry import ARCHITECTURES

if __name__ == "__main__":
    width, wide = max(map(len, ARCHITECTURES)), max(len(", ".join(found.layers)) for found in ARCHITECTURES.values())
    for found in ARCHITECTURES.values():
        print(f"{found.name:{width}}  {', '.join(found.layers):{wide}}  {found.models}")
