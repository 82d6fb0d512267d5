"""A setting's declaration: values, description, and the message for an invalid value.

A setting is a struct field of a type `Annotated` with one `msgspec.Meta`, which has bounds and description.
`Meta.extra` may have: `group`, the title in help and documents for this setting and the following ones, up to the next
group; `main`, true for a setting shown before all groups; `words`, the smallest numbers, written as words; `metavar`,
the value's placeholder in help, where FILE and FOLDER also enable path completion; `hidden`, true for a test mode that
help does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

_SHOWN: Final = 80
_FEW: Final = 16  # values that are listed
_LITERAL: Final[Any] = Literal  # made of values that are known at run time


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting. group: its title in help and documents. type: as declared. base: the type without bounds and None."""

    name: str
    group: str
    default: Any
    type: Any
    base: Any
    meta: msgspec.Meta

    @property
    def description(self) -> str:
        return self.meta.description or ""

    @property
    def is_hidden(self) -> bool:
        return bool(self._extra.get("hidden"))

    @property
    def is_main(self) -> bool:
        return bool(self._extra.get("main"))

    @property
    def words(self) -> tuple[str, ...]:
        """Numbers that are written as words."""
        return tuple(self._words)

    @property
    def choices(self) -> tuple[object, ...]:
        """All values as written, if they are few; else empty."""
        if words := self._words:
            assert self.meta.ge is not None and self.meta.le is not None, "words stand among numbers with bounds"
            numbers = range(int(self.meta.ge), int(self.meta.le) + 1)
            written = {number: word for word, number in words.items()}
            return tuple(written.get(number, number) for number in numbers) if len(numbers) <= _FEW else ()
        return get_args(self.base) if get_origin(self.base) is Literal else ()

    @property
    def written_default(self) -> str:
        """The default as a user would write it."""
        words = {number: word for word, number in self._words.items()}
        return str(words.get(self.default, self.default))

    @property
    def metavar(self) -> str:
        """The value's placeholder in help."""
        if self.choices:
            return "|".join(map(str, self.choices))
        if self._words:
            return "|".join((*self._words, "N"))
        return str(self._extra.get("metavar") or ("TEXT" if self.base is str else "N"))

    def read(self, written: object, *, strict: bool) -> object:
        """Parse a written value. strict: it has a type, as in TOML; otherwise it is text.

        Raises ValueError with the end of a sentence that begins with the setting's name.
        """
        try:
            if isinstance(written, str):
                written.encode("utf-8")  # invalid bytes of a flag or a variable
                if written in self._words:
                    return self._words[written]
            value = msgspec.convert(written, _LITERAL[self.choices] if self.choices else self.type, strict=strict)
        except (msgspec.ValidationError, UnicodeError) as error:
            raise ValueError(self._refusal(written, strict)) from error
        if value in self._words.values():
            raise ValueError(self._refusal(written, strict))  # a number that must be written as its word
        return value

    def check(self, value: object) -> None:
        """Check a struct's value. Raises ValueError like `read`."""
        try:
            msgspec.convert(value, self.type)
        except msgspec.ValidationError as error:
            raise ValueError(self._refusal(value, strict=True)) from error

    @property
    def _extra(self) -> Mapping[str, Any]:
        return self.meta.extra or {}

    @property
    def _words(self) -> Mapping[Any, int]:
        words: Mapping[Any, int] = self._extra.get("words", {})
        return words

    @property
    def _least(self) -> object:
        """The smallest value that is written as a number."""
        return max(self._words.values(), default=-1) + 1 if self._words else self.meta.ge

    def _refusal(self, value: object, strict: bool) -> str:
        if self.choices or not self._is_number(value, strict):
            return f"must be {self._values()}, and is {shown(value)}"
        number = str(value) if len(str(value)) <= _SHOWN else shown(value)
        if self.meta.gt is not None:
            return f"must be more than {self.meta.gt} and at most {self.meta.le}, and is {number}"
        if self._words:
            return f"must be {self._values()}, and is {number}"
        return f"must be between {self.meta.ge} and {self.meta.le}, and is {number}"

    def _is_number(self, value: object, strict: bool) -> bool:
        """Whether it is a number of the setting's type, within bounds or not."""
        try:
            return self.base in (int, float) and msgspec.convert(value, self.base, strict=strict) is not None
        except (msgspec.ValidationError, UnicodeError):
            return False

    def _values(self) -> str:
        """Describe the values, as a part of a sentence."""
        if choices := [str(choice) for choice in self.choices]:
            return ", ".join(choices[:-1]) + " or " + choices[-1]
        if self.base is str:
            return "text in UTF-8"
        if self.base is bool:
            return "true or false"
        kind = "a number" if self.base is float else "a whole number"
        if self.meta.gt is not None:
            return f"{kind} above {self.meta.gt}, at most {self.meta.le}"
        numbers = f"{kind} from {self._least} to {self.meta.le}"
        return ", ".join(self._words) + f" or {numbers}" if self._words else numbers


def setting(
    description: str, *, ge: float | None = None, gt: float | None = None, le: float | None = None, **extra: object
) -> msgspec.Meta:
    """Declare a setting. ge, gt, le: bounds. extra: `Meta.extra`."""
    bounds: dict[str, Any] = {"ge": ge, "gt": gt, "le": le}
    return msgspec.Meta(description=description, extra=extra, **bounds)


def settings_of(struct: type[msgspec.Struct]) -> dict[str, Setting]:
    """Return a struct's settings by name, in order."""
    found: dict[str, Setting] = {}
    group = ""
    for field in msgspec.structs.fields(struct):
        for declared in (field.type, *get_args(field.type)):  # the second for a setting that may be None
            if get_origin(declared) is Annotated:
                base, meta = get_args(declared)
                group = (meta.extra or {}).get("group", group)
                found[field.name] = Setting(field.name, group, field.default, field.type, base, meta)
                break
    return found


def shown(value: object) -> str:
    """Format a value for a sentence, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
