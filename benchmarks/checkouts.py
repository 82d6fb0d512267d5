"""Another checkout of this repository, measured beside this one by a process of its own."""

from __future__ import annotations

import inspect
import os
from pathlib import Path


class WrongCheckoutError(RuntimeError):
    """What was to be measured is not the code of the checkout that it was to be measured in."""


def environment_of(checkout: Path) -> dict[str, str]:
    """Variables for a process that runs the code of `checkout`, whichever one is installed.

    A checkout from before the packages stood under `runahead` has them at its root.
    """
    checkout = checkout.resolve()
    return os.environ | {"PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}


def check_comes_from(checkout: Path, loaded: type) -> None:
    """Raises WrongCheckoutError if a class was loaded from somewhere else."""
    file = Path(inspect.getfile(loaded)).resolve()
    if not file.is_relative_to(checkout.resolve()):
        raise WrongCheckoutError(f"{loaded.__name__} is from {file}, not from {checkout}: run `make setup` there first")
