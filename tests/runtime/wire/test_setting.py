"""What a declaration says of a setting is what is taken for it, and what a refusal says."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from runahead.runtime.wire.setting import settings_of


class Declared(msgspec.Struct, frozen=True):
    folder: str  # a field that is not a setting
    depth: Annotated[int, Meta(ge=0, le=2, description="how deep", extra={"words": {"flat": 0}})] = 1
    share: Annotated[float, Meta(gt=0, le=8)] = 0.5
    seed: Annotated[int, Meta(ge=0, le=9, extra={"hidden": True})] | None = None
    mode: Annotated[Literal["a", "b"], Meta()] = "a"
    path: Annotated[str, Meta(extra={"metavar": "FILE"})] = ""


SETTINGS = settings_of(Declared)


def test_the_settings_of_a_struct_are_its_fields_with_a_description() -> None:
    assert list(SETTINGS) == ["depth", "share", "seed", "mode", "path"]
    assert (SETTINGS["depth"].default, SETTINGS["depth"].description) == (1, "how deep")
    assert [name for name, setting in SETTINGS.items() if setting.is_hidden] == ["seed"]


def test_the_help_shows_what_a_value_looks_like() -> None:
    shown = {name: setting.metavar for name, setting in SETTINGS.items()}
    assert shown == {"depth": "flat|1|2", "share": "N", "seed": "N", "mode": "a|b", "path": "FILE"}


@pytest.mark.parametrize(
    ("name", "written", "strict", "value"),
    [
        ("depth", "flat", False, 0),
        ("depth", "2", False, 2),
        ("depth", 2, True, 2),
        ("share", "8", False, 8.0),
        ("share", 8, True, 8.0),
        ("seed", "0", False, 0),
        ("mode", "b", False, "b"),
        ("path", "5", False, "5"),
    ],
)
def test_what_somebody_writes_is_read_as_the_declared_type(
    name: str, written: object, strict: bool, value: object
) -> None:
    read = SETTINGS[name].read(written, strict=strict)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "written", "strict", "sentence"),
    [
        ("depth", "0", False, "must be flat, 1 or 2, and is '0'"),
        ("depth", "2", True, "must be flat, 1 or 2, and is '2'"),
        ("share", "0", False, "must be more than 0 and at most 8, and is 0"),
        ("share", "much", False, "must be a number above 0, at most 8, and is 'much'"),
        ("seed", "10", False, "must be between 0 and 9, and is 10"),
        ("seed", "1.5", False, "must be a whole number from 0 to 9, and is '1.5'"),
        ("seed", "\udcff", False, "must be a whole number from 0 to 9, and is '\\udcff'"),
        ("mode", "c", False, "must be a or b, and is 'c'"),
        ("path", 5, True, "must be text in UTF-8, and is 5"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_can(
    name: str, written: object, strict: bool, sentence: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        SETTINGS[name].read(written, strict=strict)
    assert str(refusal.value) == sentence


def test_a_value_that_a_struct_holds_is_looked_at_without_words() -> None:
    SETTINGS["depth"].check(0)
    SETTINGS["seed"].check(None)
    with pytest.raises(ValueError, match="must be flat, 1 or 2, and is 3"):
        SETTINGS["depth"].check(3)
    with pytest.raises(ValueError, match="must be between 0 and 9, and is -1"):
        SETTINGS["seed"].check(-1)
