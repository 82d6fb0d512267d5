"""`python -m runahead.runtime.models` prints the architectures that are served, what their layers may be, models that
are known to be of them, and whose checkpoints come with a head that drafts."""

from __future__ import annotations

import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load, an interrupt ends it without a word
    from runahead.runtime.models.registry import ARCHITECTURES

    width, wide = max(map(len, ARCHITECTURES)), max(len(", ".join(found.layers)) for found in ARCHITECTURES.values())
    for found in ARCHITECTURES.values():
        head = "" if found.heads is None else "; a head comes with it (--drafter mtp)"
        print(f"{found.name:{width}}  {', '.join(found.layers):{wide}}  {found.models}{head}")


if __name__ == "__main__":
    main()
