"""The table in `docs/settings.md`, written from the declarations: `python -m tests.project.settings_table`."""

from __future__ import annotations

from typing import Final

from runahead.runtime.wire.setting import Setting
from runahead.service.settings.settings import SETTINGS, default_text, flag_of
from runahead.service.settings.variables import variable_of
from tests.project.repository import ROOT

PAGE: Final = ROOT / "docs/settings.md"
COMMAND: Final = "python -m tests.project.settings_table"
_HEAD: Final = ("| flag | variable | default; or other values | what |", "|---|---|---|---|")


def table_rows() -> list[str]:
    """One row for each setting that the help shows."""
    rows: list[str] = []
    for name, setting in SETTINGS.items():
        if not setting.is_hidden:
            rows.append(f"| `{flag_of(name)}` | `{variable_of(name)}` | {_values(setting)} | {setting.description} |")
    return rows


def rows_of(page: str) -> list[str]:
    """The rows of the table that stands in a document. Raises ValueError where there is none."""
    lines = page.splitlines()
    begin = lines.index(_HEAD[0]) + len(_HEAD)
    end = next((at for at in range(begin, len(lines)) if not lines[at].startswith("|")), len(lines))
    return lines[begin:end]


def _values(setting: Setting) -> str:
    """The default, and where values are few the others."""
    default = default_text(setting)
    others = [f"`{choice}`" for choice in setting.choices if str(choice) != default]
    if not others:
        return f"`{default}`" if default else ""
    return f"`{default}`; or {', '.join(others)}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    old = "\n".join([*_HEAD, *rows_of(text)])
    PAGE.write_text(text.replace(old, "\n".join([*_HEAD, *table_rows()])), encoding="utf-8")
