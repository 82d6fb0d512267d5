"""Where a checkpoint lies is said without torch, which a front end does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runahead.runtime import checkpoint


@pytest.mark.parametrize("name", ["CONFIG", "GENERATION_CONFIG", "WEIGHTS", "TOKENIZER", "TOKENIZER_CONFIG"])
def test_the_bundled_model_has_the_file(name: str) -> None:
    assert (checkpoint.BUNDLED_FOLDER / getattr(checkpoint, name)).is_file()


def test_it_loads_no_torch() -> None:
    program = "import sys, runahead.runtime.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0
