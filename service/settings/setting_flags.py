"""Settings as command-line flags: groups of `--help` and shell completion."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Final

from runahead.runtime.wire.engine_config import EngineSettings
from runahead.runtime.wire.setting import Setting, settings_of
from runahead.service.settings.settings import CONFIG_VARIABLE, SETTINGS, flag_of, variable_of

MAIN_GROUP: Final = "Main settings"
_NOT_OF_KERNELS: Final = ("Model", "Processes", "Logs")  # groups of the engine's settings


class _Offered(tuple[str, ...]):
    """Values for shell completion. The parser accepts others, which `load_settings` refuses with one sentence, as it
    does for variables and files.
    """

    def __contains__(self, value: object) -> bool:
        return True


def groups_of(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    """Return shown settings by group title: main ones first, each once."""
    shown = [setting for setting in settings if not setting.is_hidden]
    groups = {MAIN_GROUP: [setting for setting in shown if setting.is_main]}
    for setting in shown:
        if not setting.is_main:
            groups.setdefault(setting.group, []).append(setting)
    return groups


def changes_kernels(setting: Setting) -> bool:
    """Whether `runahead kernels` depends on this setting."""
    of_engine = setting.name in settings_of(EngineSettings) and setting.group not in _NOT_OF_KERNELS
    return of_engine or setting.name == "model"


def add_flags(
    parser: argparse.ArgumentParser, is_shown: Callable[[Setting], bool] = lambda setting: not setting.is_hidden
) -> None:
    """Add one flag for each setting, and `--config`. Values stay text until `load_settings`.

    is_shown: shown by help; others are accepted too.
    """
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_VARIABLE}]")
    shown = groups_of(filter(is_shown, SETTINGS.values()))
    for title, settings in shown.items():
        group = parser.add_argument_group(title)
        for setting in settings:
            default = default_text(setting) or "unset"
            _add_flag(group, setting, f"{setting.description} [{variable_of(setting.name)}, default {default}]")
    named = {setting.name for settings in shown.values() for setting in settings}
    for name, setting in SETTINGS.items():
        if name not in named:
            _add_flag(parser, setting, argparse.SUPPRESS)


def default_text(setting: Setting) -> str:
    """Return a setting's default as a user would write it."""
    return str(setting.default).lower() if setting.base is bool else setting.written_default


def _add_flag(container: argparse._ActionsContainer, setting: Setting, help_text: str) -> None:
    if setting.base is bool:
        switch = argparse.BooleanOptionalAction
        container.add_argument(flag_of(setting.name), action=switch, default=None, help=help_text)
    else:
        offered = _Offered(map(str, setting.choices or setting.words)) or None
        container.add_argument(flag_of(setting.name), metavar=setting.metavar, choices=offered, help=help_text)
