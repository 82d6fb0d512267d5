"""Prints the supported architectures: `python -m runahead.runtime.models` lists their layers, known models, and which
have a draft head.
"""

from __future__ import annotations

import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until modules are loaded, an interrupt ends it silently
    from runahead.runtime.models.registry import ARCHITECTURES

    width, wide = max(map(len, ARCHITECTURES)), max(len(", ".join(found.layers)) for found in ARCHITECTURES.values())
    for found in ARCHITECTURES.values():
        head = "" if found.heads is None else "; a head comes with it (--drafter mtp)"
        print(f"{found.name:{width}}  {', '.join(found.layers):{wide}}  {found.models}{head}")


if __name__ == "__main__":
    main()
