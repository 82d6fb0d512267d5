"""Settings: a flag over the environment over the file over the default, and a sentence for what can't be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config
from runahead.service.settings import (
    Settings,
    SettingsError,
    add_flags,
    engine_config,
    load_settings,
    setting_names,
)


def parse(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return vars(parser.parse_args(arguments))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "runahead.toml"


def test_without_any_setting_every_default_holds() -> None:
    assert load_settings(parse(), {}) == Settings()


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(config_file: Path) -> None:
    config_file.write_text("port = 1001\nmax_rows = 11\nmax_queue = 12\n")
    environment = {"RUNAHEAD_PORT": "1002", "RUNAHEAD_MAX_ROWS": "21"}
    settings = load_settings(parse("--port", "1003"), environment, str(config_file))
    assert (settings.port, settings.max_rows, settings.max_queue) == (1003, 21, 12)
    assert settings.block_size == Settings().block_size


def test_the_environment_may_name_the_file(config_file: Path) -> None:
    config_file.write_text('host = "::1"')
    assert load_settings({}, {"RUNAHEAD_CONFIG": str(config_file)}).host == "::1"


def test_every_setting_can_be_given_in_all_three_places(config_file: Path) -> None:
    changed: dict[str, Any] = {
        "model": "elsewhere", "served_name": "name", "load_format": "dummy", "tokenizer": "none", "device": "cuda",
        "dtype": "bfloat16",
        "run_ahead": 4, "run_ahead_tokens": 7, "max_rows": 8, "max_queue": 9, "context_length": 10, "block_size": 32,
        "num_blocks": 11, "prefill_chunk": 64, "max_prefill_tokens": 65, "prefix_cache": False, "penalty_slots": 5,
        "log_interval": 6, "log_mode": "barrier", "threads": 3, "launch_timeout_s": 60.5,
        "host": "localhost", "port": 1, "insecure": True, "max_streams": 2, "log_level": "debug",
        "log_format": "console", "jitter_seed": 5, "shutdown_grace_s": 2.5, "counters_from": 12,
    }  # fmt: skip
    assert set(changed) == set(setting_names()), "this test must name every setting"
    expected = Settings(**changed)

    flags = []
    for name, value in changed.items():
        flags.append(("--no-" if value is False else "--") + name.replace("_", "-"))
        if not isinstance(value, bool):
            flags.append(str(value))
    assert load_settings(parse(*flags), {}) == expected

    environment = {"RUNAHEAD_" + name.upper(): str(value) for name, value in changed.items()}
    assert load_settings({}, environment) == expected

    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in changed.items()
    ]
    config_file.write_text("\n".join(lines))
    assert load_settings({}, {}, str(config_file)) == expected


def test_a_switch_can_be_turned_off_again_by_a_flag() -> None:
    assert load_settings(parse("--no-insecure"), {"RUNAHEAD_INSECURE": "true"}).insecure is False


@pytest.mark.parametrize(
    ("environment", "file_text", "flags", "named"),
    [
        ({"RUNAHEAD_PROT": "1"}, "", {}, "RUNAHEAD_PROT is no setting; did you mean RUNAHEAD_PORT?"),
        ({"RUNAHEAD_PORT": "many"}, "", {}, "RUNAHEAD_PORT must be a whole number from 0 to 65535"),
        ({}, "prot = 1", {}, "'prot' in .* is no setting; did you mean port?"),
        ({}, "port = '1'", {}, "port in .* must be a whole number"),
        ({}, "port = [", {}, "can't be read"),
        ({}, "", {"port": "70000"}, "--port must be a whole number from 0 to 65535, and is '70000'"),
        ({}, "", {"run_ahead": "5"}, "--run-ahead must be .*serial"),
        ({}, "", {"device": "tpu"}, "--device must be cpu or cuda"),
        ({}, "", {"tokenizer": "mine"}, "--tokenizer must be auto or none, and is 'mine'"),
        ({"RUNAHEAD_INSECURE": "perhaps"}, "", {}, "RUNAHEAD_INSECURE must be true or false"),
        ({}, "", {"max_streams": "0"}, "--max-streams must be a whole number from 1 to 100000"),
        ({}, "", {"shutdown_grace_s": "-1"}, "--shutdown-grace-s must be a number from 0 to 3600"),
        ({}, "", {"shutdown_grace_s": "nan"}, "--shutdown-grace-s must be a number from 0 to 3600"),
        ({}, "", {"log_mode": "drain"}, "--log-mode must be events or barrier, and is 'drain'"),
        ({}, "prefix_cache = 1", {}, "prefix_cache in .* must be true or false"),
        ({"RUNAHEAD_PENALTY_SLOTS": "few"}, "", {}, "RUNAHEAD_PENALTY_SLOTS must be a whole number"),
        ({}, "", {"log_interval": "1.5"}, "--log-interval must be a whole number"),
        ({}, "", {"served_name": "\udcff"}, r"--served-name must be text in UTF-8, and is '\\udcff'"),
        ({}, "", {"launch_timeout_s": "inf"}, "--launch-timeout-s must be a number above 0, at most 604800"),
        ({}, "", {"jitter_seed": "-1"}, "--jitter-seed must be a whole number"),
        ({}, "jitter_seed = 1.5", {}, "jitter_seed in .* must be a whole number"),
    ],
)
def test_an_unknown_or_impossible_setting_is_named(
    environment: dict[str, str], file_text: str, flags: dict[str, object], named: str, config_file: Path
) -> None:
    config_file.write_text(file_text)
    with pytest.raises(SettingsError, match=named):
        load_settings(flags, environment, str(config_file))


NO_VALUE = ["", "x", "1.5.", "-1", "9" * 30, "9" * 5000, "nan", "inf", "1e400", "0x1G", "[1]", "\udcff"]
"""Text that is no value of most settings; the last is what an undecodable byte becomes in an argument or a variable."""


def accepted_or_refused(name: str, flags: Mapping[str, object], environment: Mapping[str, str]) -> str | None:
    """The sentence that refuses the settings, before anything is started; None where they are taken."""
    try:
        config = engine_config(load_settings(flags, environment))
        check_config(config)
        msgspec.json.encode(config)  # as it goes to the engine
    except (SettingsError, ConfigError) as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("text", NO_VALUE, ids=lambda text: ascii(text[:6]))
@pytest.mark.parametrize("name", setting_names())
def test_whatever_is_given_is_taken_or_refused_with_a_sentence_that_names_it(name: str, text: str) -> None:
    variable = "RUNAHEAD_" + name.upper()
    for flags, environment, spelled in [
        ({name: text}, {}, "--" + name.replace("_", "-")),
        ({}, {variable: text}, variable),
    ]:
        sentence = accepted_or_refused(name, flags, environment)
        if sentence is None:
            continue
        assert spelled in sentence or name in sentence
        assert text == "9" * 5000 or text == "" or text.strip("'") in sentence or ascii(text).strip("'") in sentence
        assert any(words in sentence for words in ("must be", "is no folder")), sentence
        assert "invalid" not in sentence and "codec" not in sentence
        assert len(sentence) < 300 and "\n" not in sentence


def test_no_setting_takes_all_that_is_no_value() -> None:
    """The test above asks nothing of a setting that takes everything: these are names, and taken as they are."""
    takes_all = {
        name
        for name in setting_names()
        if all(accepted_or_refused(name, {name: text}, {}) is None for text in NO_VALUE if text != "\udcff")
    }
    assert takes_all == {"served_name", "host"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml can't be read"):
        load_settings({}, {}, str(tmp_path / "absent.toml"))


def test_variables_of_other_programs_are_nobodys_business() -> None:
    assert load_settings({}, {"PATH": "/bin", "RUNAHEADS": "1"}) == Settings()


def test_the_engine_gets_what_was_set(tmp_path: Path) -> None:
    settings = Settings(model=str(tmp_path), run_ahead="serial", max_rows=3, threads=1, jitter_seed=9, counters_from=4)
    assert engine_config(settings) == EngineConfig(
        model=str(tmp_path),
        served_name=tmp_path.name,
        run_ahead=0,
        max_rows=3,
        threads=1,
        jitter_seed=9,
        counters_from=4,
    )


def test_the_engine_gets_what_was_set_of_cache_penalties_and_logging() -> None:
    settings = Settings(prefix_cache=False, penalty_slots=0, log_interval=1, log_mode="barrier")
    config = engine_config(settings)
    assert (config.prefix_cache, config.penalty_slots) == (False, 0)
    assert (config.log_interval, config.log_mode) == (1, "barrier")
    check_config(config)  # to log every launch behind a barrier is serial, and allowed


def test_without_any_setting_the_engine_gets_its_own_defaults() -> None:
    config = engine_config(Settings())
    assert config == EngineConfig(model=config.model, served_name="bundled")


def test_the_default_model_is_the_one_in_the_package() -> None:
    assert Path(engine_config(Settings()).model).parts[-3:] == ("runtime", "models", "bundled")


def test_a_hub_id_gets_a_sentence_on_how_to_download_it() -> None:
    with pytest.raises(SettingsError, match=r"hf download some-org/Some-Model-1\.5B --local-dir Some-Model-1\.5B"):
        engine_config(Settings(model="some-org/Some-Model-1.5B"))


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"'\./absent' is no folder"):
        engine_config(Settings(model="./absent"))
