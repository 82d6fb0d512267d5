"""The process that renders one chat template, within bounds, and ends.

It reads one object of JSON from standard input and writes one to standard output. No signal or thread of the same
process could end a template that computes a number of a billion digits: so it has a process to itself, which the system
ends.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Any, Final

from jinja2 import TemplateError

from runahead.service.commands.template_sandbox import RefusedByTemplate, TooLong, render

PROCESSOR_S: Final = 3
MEMORY_BYTES: Final = 512 << 20


def main() -> None:
    """Answers with `text`; or with `refused`, in the template's words, or `failed`, why it can't be rendered."""
    asked = json.load(sys.stdin)
    _bound()
    json.dump(_answer(asked), sys.stdout)


def _bound() -> None:
    """Of its own processor time and memory. Beyond the first the system ends this process."""
    for kind, bounds in (
        (resource.RLIMIT_CORE, (0, 0)),
        (resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S + 1)),
        (resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS has no bound on the address space
            resource.setrlimit(kind, bounds)


def _answer(asked: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(asked["template"], asked["messages"], asked["tokens"])}
    except RefusedByTemplate as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"failed": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"failed": "it calls itself without an end"}
    except (TemplateError, TooLong) as error:
        return {"failed": str(error)}
    except Exception as error:  # whatever an operation in it raises
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
