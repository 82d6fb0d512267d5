"""`--help` of the commands that take settings: the main settings first, then groups as in docs/settings.md."""

from __future__ import annotations

import re

import pytest

from runahead.runtime.wire.engine_config import EngineSettings
from runahead.runtime.wire.setting import settings_of
from runahead.service import cli
from runahead.service.settings.setting_flags import MAIN_GROUP, groups_of
from runahead.service.settings.settings import SETTINGS, flag_of
from tests.project.repository import ROOT


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, list[str]]]:
    """The text before the first flag, and flags by the title of their group."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    begin = text.index("options:\n")
    groups: dict[str, list[str]] = {}
    for line in text[begin:].splitlines():
        if title := re.fullmatch(r"(\w.*):", line):
            flags = groups.setdefault(title[1], [])
        elif flag := re.match(r"  (--[a-z-]+)", line):
            flags.append(flag[1])
    return text[:begin], groups


def test_the_ten_main_settings_come_first_and_each_other_one_once_under_the_titles_of_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, groups = help_of("serve", capsys)
    del groups["options"]  # --help and --config
    titles = re.findall(r"^### (.+)$", (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert list(groups) == titles
    assert titles[0] == MAIN_GROUP
    assert len(groups[MAIN_GROUP]) == 10
    assert groups[MAIN_GROUP][:3] == ["--model", "--host", "--port"]
    assert {"--device", "--callers", "--max-rows", "--context-length", "--run-ahead"} <= set(groups[MAIN_GROUP])
    shown = [flag for flags in groups.values() for flag in flags]
    assert sorted(shown) == sorted(flag_of(name) for name, setting in SETTINGS.items() if not setting.is_hidden)


def test_every_setting_is_in_a_group_with_a_title() -> None:
    groups = groups_of(SETTINGS.values())
    assert "" not in groups
    assert all(len(settings) >= 2 for settings in groups.values())


@pytest.mark.parametrize("command", ["serve", "kernels"])
def test_the_usage_is_short_and_an_example_is_a_line_to_copy(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    head, _ = help_of(command, capsys)
    assert head.startswith(f"usage: runahead {command} [--config FILE] [--SETTING VALUE ...]\n\n")
    assert f"\n  runahead {command} --model " in head
    assert len(head.splitlines()) < 20
    assert all(len(line) < 100 for line in head.splitlines())


def test_the_help_of_kernels_lists_settings_of_the_engine_that_change_them_and_takes_the_others_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, groups = help_of("kernels", capsys)
    shown = {flag for title, flags in groups.items() if title != "options" for flag in flags}
    assert {"--model", "--kernel-cache", "--max-rows", "--drafter", "--dtype"} <= shown
    assert shown - {"--model"} <= set(map(flag_of, settings_of(EngineSettings)))
    assert not shown & {"--log-interval", "--launch-timeout-s", "--served-name", "--load-format"}
    assert cli.main(["kernels", "--port", "1", "--device", "cpu"]) == 2
    assert "needs no kernels" in capsys.readouterr().err
