"""The process that renders chats: `python -m runahead.service.chat.template_process`.

Reads JSON lines from standard input and writes one answer for each to standard output
(`runahead.service.chat.template_messages`). A template is untrusted code, and no signal or thread of the same process
could end one that computes a billion-digit number. In this process the system limits its processor time and memory, and
it can reach nothing. The process ends when its input ends.
"""

from __future__ import annotations

import signal
import sys
from typing import Final

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError

from runahead.service.chat.chat_values import ChatFault
from runahead.service.chat.rendering import RefusedByTemplate, Rendering, TooLong, load_modules
from runahead.service.chat.template_messages import MEMORY_BYTES, RENDER_S, Asked, Fault, Rendered, Templates
from runahead.service.workers.worker_side import Ready, confine, read_orders, say

_RENDERINGS: Final = 256  # of one process
_WORDS: Final = 512  # characters of a template's error message that are passed on


def main() -> int:
    """Answer until the input ends. Returns the exit code."""
    orders = read_orders(Templates)
    load_modules()
    say(Ready(warning=confine(MEMORY_BYTES)))
    rendering = Rendering(orders)
    for count, line in enumerate(sys.stdin.buffer, 1):
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        answer = _answer(rendering, line)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        is_last = count == _RENDERINGS or answer.fault == "cost"
        say(msgspec.structs.replace(answer, is_last=is_last))
        if is_last:
            break
    return 0


def _answer(rendering: Rendering, line: bytes) -> Rendered:
    try:
        return Rendered(rendering.text(msgspec.json.decode(line, type=Asked)))
    except ChatFault as fault:
        return Rendered(fault="request", field=fault.field, sentence=fault.sentence)
    except RefusedByTemplate as error:
        return _refused(f"are refused by the chat template: {error}", field="messages")
    except TooLong as error:
        return _refused(str(error), fault="cost")
    except MemoryError:
        return _refused(f"needs more than {MEMORY_BYTES >> 20} MiB of memory to be rendered", fault="cost")
    except RecursionError:
        return _refused("can't be rendered: the chat template calls itself without an end")
    except TemplateSyntaxError as error:
        return _refused(f"{error} (line {error.lineno})", fault="template")
    except TemplateError as error:
        return _refused(f"can't be rendered: {error}")
    except Exception as error:  # any error of a template's operation
        return _refused(f"can't be rendered: {type(error).__name__}: {error}")


def _refused(words: str, *, fault: Fault = "request", field: str = "") -> Rendered:
    """Make the answer for a fault, with its words on one line and without invalid characters."""
    line = " ".join(words.encode("utf-8", "replace").decode().split())
    return Rendered(fault=fault, field=field, sentence=line if len(line) <= _WORDS else line[: _WORDS - 1] + "…")


if __name__ == "__main__":
    sys.exit(main())
