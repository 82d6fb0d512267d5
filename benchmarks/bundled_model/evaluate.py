"""What `make eval` runs: what the bundled model can do, on standard library files that it was not trained on.

    python -m benchmarks.bundled_model.evaluate [--show 3]

Bits a byte come from the service's own decoder on the CPU in float32, completions from a running service. About three
minutes on two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import runahead.runtime.models
from benchmarks.bundled_model.acceptance import PLACES, acceptance
from benchmarks.bundled_model.completions import Completion, choose_heads, complete
from benchmarks.bundled_model.compression import compress
from benchmarks.bundled_model.corpus import SourceFile, held_out_files, held_out_listing, standard_library

BUNDLED = Path(runahead.runtime.models.__path__[0]) / "bundled"
HEADS = 50
MAX_TOKENS = 200
TEMPERATURES = (0.5, 0.0)  # greedy decoding of a small model repeats itself more often


def check_files(files: Sequence[SourceFile]) -> str:
    """Whether these are the files that the model card's figures were measured on."""
    listing = held_out_listing()
    known: dict[str, str] = listing["files"]
    here = {file.path: file.sha256 for file in files}
    if here == known:
        return f"the {len(here)} held-out files are those of the model card (Python {listing['python']})"
    changed = sum(1 for path in here.keys() & known.keys() if here[path] != known[path])
    return (
        f"this is Python {platform.python_version()}; the model card's figures are from {listing['python']}. Of "
        f"{len(here)} held-out files here, {changed} differ; {len(known.keys() - here.keys())} are missing."
    )


def print_compression(model: Path, files: Sequence[SourceFile]) -> None:
    """Bits a byte of the held-out files, beside xz -9."""
    rows: dict[str, list[tuple[str, ...]]] = {
        "top-level definitions": [file.definitions for file in files],
        "whole files": [(file.text,) for file in files],
    }
    print(f"{'bits a byte':24}{'bytes':>10}{'model':>10}{'xz -9, each file':>20}{'xz -9, as one':>17}")
    for name, texts in rows.items():
        cost = compress(model, texts)
        print(
            f"{name:24}{cost.text_bytes:10,}{cost.model:10.3f}{cost.xz_each:20.3f}{cost.xz_together:17.3f}", flush=True
        )


def print_completions(model: Path, files: Sequence[SourceFile], show: int) -> None:
    """How completions of held-out function heads end, and how many `ast` parses."""
    heads = choose_heads(files, HEADS)
    print(
        f"\n{f'{len(heads)} function heads':24}{f'ended within {MAX_TOKENS} tokens':>27}{'ast parses':>13}{'both':>7}"
    )
    done = complete(model, heads, MAX_TOKENS, TEMPERATURES)
    for temperature, completions in done.items():
        name = f"temperature {temperature:g}" if temperature else "greedy"
        ended = sum(c.ended for c in completions)
        both = sum(c.ended and c.parses for c in completions)
        share = f"{ended} ({ended / len(completions):.0%})"
        print(f"{name:24}{share:>27}{sum(c.parses for c in completions):13}{both:7}")
    for completion in done[TEMPERATURES[0]][:show]:
        print_one(completion)


def print_acceptance(files: Sequence[SourceFile]) -> None:
    """Measure acceptance on held-out function heads, of the bundled model's head and of n-gram drafts."""
    heads = choose_heads(files, HEADS)
    names = "".join(f"{place:>8}" for place in range(1, PLACES + 1))
    print(f"\n{'drafts that are right':28}{names}   tokens a launch")
    for drafter in ("eagle", "ngram"):
        for temperature in (0.0, 0.8):
            found = acceptance(heads, MAX_TOKENS, temperature, ["--drafter", drafter, "--draft-tokens", str(PLACES)])
            shares = "".join(f"{share:>8.0%}" for share in found.shares)
            print(f"{f'{drafter}, temperature {temperature:g}':28}{shares}{found.tokens_a_launch:>18.2f}", flush=True)


def print_one(completion: Completion) -> None:
    """A completion as a person reads it, the model's part behind a bar."""
    verdict = "ended by itself" if completion.ended else f"cut after {MAX_TOKENS} tokens"
    print(f"\n--- {verdict}, {'parses' if completion.parses else 'does not parse'}")
    for line in completion.head.splitlines():
        print(f"    {line}")
    for line in completion.text.splitlines():
        print(f"  | {line}")


def main() -> None:
    """Print the tables. Exits 1 where this Python's standard library has no source to read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED, help="checkpoint folder (the bundled model)")
    parser.add_argument("--show", type=int, default=0, help="print this many completions")
    arguments = parser.parse_args()
    started = time.monotonic()
    files = held_out_files()
    if not files:
        sys.exit(f"no held-out source files under {standard_library()}: this Python ships its library without source")
    print(check_files(files) + "\n")
    print_compression(arguments.model, files)
    print_completions(arguments.model, files, arguments.show)
    if arguments.model.resolve() == BUNDLED.resolve():
        print_acceptance(files)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
