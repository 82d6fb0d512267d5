"""The tables in `docs/settings.md`, written from the declarations: `python -m tests.project.settings_table`."""

from __future__ import annotations

from typing import Final

from runahead.runtime.wire.setting import Setting
from runahead.service.settings.setting_flags import default_text, groups_of
from runahead.service.settings.settings import SETTINGS, flag_of, variable_of
from tests.project.repository import ROOT

PAGE: Final = ROOT / "docs/settings.md"
COMMAND: Final = "python -m tests.project.settings_table"
_TITLE: Final = "## All settings\n"
_HEAD: Final = ("| flag | variable | default; or other values | what |", "|---|---|---|---|")


def tables() -> str:
    """A heading and a table for each group of `runahead serve --help`, a row for each setting that it shows."""
    return "".join(
        "\n".join(["", f"### {title}", "", *_HEAD, *map(_row, settings), ""])
        for title, settings in groups_of(SETTINGS.values()).items()
    )


def tables_of(page: str) -> str:
    """The tables that stand in a document. Raises ValueError where there are none."""
    begin = page.index(_TITLE) + len(_TITLE)
    lines = page[begin:].splitlines(keepends=True)
    end = next(at for at, line in enumerate(lines) if not line.startswith(("|", "### ", "\n")))
    return "".join(lines[:end]).rstrip("\n") + "\n"


def _row(setting: Setting) -> str:
    return f"| `{flag_of(setting.name)}` | `{variable_of(setting.name)}` | {_values(setting)} | {setting.description} |"


def _values(setting: Setting) -> str:
    """The default, and where values are few the others."""
    default = default_text(setting)
    others = [f"`{choice}`" for choice in setting.choices or setting.words if str(choice) != default]
    if not others:
        return f"`{default}`" if default else ""
    return f"`{default}`; or {', '.join(others)}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(tables_of(text), tables()), encoding="utf-8")
