"""runahead generates tokens on a GPU that never waits for its host.

`runahead.v1` is the contract as Python modules, one package for each of its versions. `__version__` names the commit
too, where it is known, as `runahead --version` does.
"""

from typing import TYPE_CHECKING

__version__: str

if not TYPE_CHECKING:  # a type checker would take every misspelt name for a string

    def __getattr__(name: str) -> str:
        """The version is found out when it is asked for: no import has to wait for git."""
        if name == "__version__":
            from runahead.service.version import full_version

            return full_version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
