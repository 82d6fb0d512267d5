"""The command line's parser: explains a wrong flag or command in one sentence with a suggestion."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Final, NoReturn

EXIT_USAGE: Final = 2
_GONE: Final = {"exact": "all kernels are exact"}  # former settings


class _Paragraphs(argparse.HelpFormatter):
    """Wraps descriptions line by line and keeps indented lines, which are examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            line if line.startswith(" ") else super(_Paragraphs, self)._fill_text(line, width, indent)
            for line in text.splitlines()
        )
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one sentence instead of usage, and knows its flags by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=_Paragraphs)

    @property
    def actions(self) -> list[argparse.Action]:
        """Return flags and arguments, including groups'."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def refuse(self, argument: str) -> NoReturn:
        """End the process because of an unknown argument."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        flag = argument.partition("=")[0]
        self.error(f"{flag} is not a flag" + did_you_mean(flag, self.flags()))

    def flags(self) -> list[str]:
        """Return the flags that help shows."""
        return [flag for action in self.actions if action.help != argparse.SUPPRESS for flag in action.option_strings]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` as the end of a sentence, why a former setting is gone, or empty without a similar
    name. given: a flag, a variable or a name."""
    name = given.lstrip("-").lower().rpartition("__")[2]
    if name in _GONE:
        return f"; it is gone: {_GONE[name]}"
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def parse(parser: Parser, commands: dict[str, Parser], arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. commands: subparsers by name.

    Ends the process with status 2 and a sentence for an unknown flag or command.
    """
    leading = list(takewhile(lambda argument: argument.startswith("-"), arguments))
    for flag in leading:
        if flag not in parser.flags():
            parser.refuse(flag)
    for command in arguments[len(leading) :][:1]:
        if command not in commands:
            parser.error(f"{command!r} is not a command" + did_you_mean(command, commands))
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[parsed.command].refuse(unknown[0])
    return parsed
