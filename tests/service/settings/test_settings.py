"""Settings: a flag over the environment over the file over the default, and a sentence for what can't be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runahead.runtime.checkpoint import BUNDLED_FOLDER, BUNDLED_HEAD
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, EngineSettings
from runahead.service.settings.setting_flags import add_flags
from runahead.service.settings.settings import (
    SETTINGS,
    FrontEndSettings,
    Settings,
    SettingsError,
    engine_config,
    flag_of,
    load_settings,
    variable_of,
)

FLAGS = {name: flag_of(name) for name in SETTINGS}


def parse(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def chosen(settings: Settings) -> dict[str, object]:
    """Every setting's value, by name."""
    return {**msgspec.structs.asdict(settings.front_end), **msgspec.structs.asdict(settings.engine)}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "runahead.toml"


def test_without_any_setting_every_default_holds() -> None:
    assert load_settings(parse(), {}) == Settings()


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(config_file: Path) -> None:
    config_file.write_text("port = 1001\nmax_rows = 11\nmax_queue = 12\n")
    environment = {"RUNAHEAD__PORT": "1002", "RUNAHEAD__MAX_ROWS": "21"}
    settings = load_settings(parse("--port", "1003"), environment, str(config_file))
    assert (settings.front_end.port, settings.engine.max_rows, settings.engine.max_queue) == (1003, 21, 12)
    assert settings.engine.block_size == Settings().engine.block_size
    called = {name: settings.spelling(name) for name in ("port", "max_rows", "max_queue", "block_size")}
    assert called == {
        "port": "--port",
        "max_rows": "RUNAHEAD__MAX_ROWS",
        "max_queue": f"max_queue in {config_file}",
        "block_size": "--block-size",
    }


def test_the_environment_may_name_the_file(config_file: Path) -> None:
    config_file.write_text('host = "::1"')
    assert load_settings({}, {"RUNAHEAD__CONFIG": str(config_file)}).front_end.host == "::1"


def test_every_setting_can_be_given_in_all_three_places(config_file: Path) -> None:
    changed: dict[str, Any] = {
        "model": "elsewhere", "served_name": "name", "load_format": "dummy", "tokenizer": "none", "chat_template": "t",
        "device": "cuda", "dtype": "bfloat16", "quantize": "fp8", "tensor_parallel": 2,
        "run_ahead": 4, "run_ahead_tokens": 7, "max_rows": 8, "max_queue": 9, "context_length": 10, "block_size": 32,
        "num_blocks": 12, "prefill_chunk": 64, "max_prefill_tokens": 65, "prefix_cache": False, "penalty_slots": 5,
        "mixed_prefill_tokens": 66, "token_gap_ms": 67, "kv_dtype": "fp8",
        "drafter": "eagle", "draft_tokens": 3, "draft_model": "head", "draft_forced": False,
        "state_snapshots": 17, "state_snapshot_blocks": 18,
        "log_interval": 6, "log_mode": "barrier", "nvtx": True, "threads": 3, "launch_timeout_s": 60.5,
        "host": "localhost", "port": 1, "frontends": 3, "insecure": True, "max_streams": 2, "log_level": "debug",
        "log_format": "console", "jitter_seed": 5, "shutdown_grace_s": 2.5, "counters_from": 12,
        "kernel_cache": "/kernels",
        "tls_cert": "c.pem", "tls_key": "k.pem", "tls_client_ca": "a.pem", "callers": "callers.txt",
        "max_connections": 3, "max_connection_streams": 4, "max_connection_idle_s": 5.5, "max_connection_age_s": 6.5,
        "max_connection_age_grace_s": 7.5, "handshake_timeout_s": 8.5, "upload_timeout_s": 9.5,
        "max_metadata_bytes": 2048, "max_pending_calls": 11, "pending_timeout_s": 12,
        "max_caller_streams": 1, "max_queued_tokens": 13, "max_caller_queued_tokens": 3, "max_tokenizing_bytes": 14,
        "max_caller_tokenizing_bytes": 4, "max_uploads": 15, "max_caller_uploads": 5,
        "keepalive_time_s": 13.5, "keepalive_timeout_s": 14.5, "min_ping_interval_s": 15.5, "max_ping_strikes": 16,
        "max_request_bytes": 1717, "max_response_bytes": 1818181, "max_completion_s": 19.5, "stalled_stream_s": 20.5,
        "plaintext_tokens": True, "share_prefix_cache": True, "reflection": False, "request_log": False,
        "otlp_endpoint": "http://c:1", "vllm_facade": True, "structure_compile_s": 2.5, "structure_memory_mb": 99,
        "health_host": "::1", "health_port": 13, "control_port": 14, "metrics_host": "::1", "metrics_port": 15,
        "kv_events": True, "kv_events_host": "::1", "kv_events_port": 16, "kv_events_replay_port": 17,
        "kv_events_pod": "pod",
    }  # fmt: skip
    assert set(changed) == set(SETTINGS), "this test must name every setting"
    defaults = chosen(Settings())
    assert not [name for name, value in changed.items() if value == defaults[name]], "none is its default"

    flags = []
    for name, value in changed.items():
        flags.append(("--no-" if value is False else "--") + name.replace("_", "-"))
        if not isinstance(value, bool):
            flags.append(str(value))
    assert chosen(load_settings(parse(*flags), {})) == changed

    environment = {"RUNAHEAD__" + name.upper(): str(value) for name, value in changed.items()}
    assert chosen(load_settings({}, environment)) == changed

    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in changed.items()
    ]
    config_file.write_text("\n".join(lines))
    assert chosen(load_settings({}, {}, str(config_file))) == changed


def test_a_switch_can_be_turned_off_again_by_a_flag() -> None:
    assert load_settings(parse("--no-insecure"), {"RUNAHEAD__INSECURE": "true"}).front_end.insecure is False


@pytest.mark.parametrize(
    ("environment", "file_text", "flags", "named"),
    [
        ({"RUNAHEAD__PROT": "1"}, "", {}, "RUNAHEAD__PROT is not a setting; did you mean RUNAHEAD__PORT?"),
        ({"RUNAHEAD__PORT": "many"}, "", {}, "RUNAHEAD__PORT must be a whole number from 0 to 65535"),
        ({}, "prot = 1", {}, "'prot' in .* is not a setting; did you mean port?"),
        ({}, "port = '1'", {}, "port in .* must be a whole number"),
        ({}, "port = [", {}, "can't be read"),
        ({}, "", {"port": "70000"}, "--port must be between 0 and 65535, and is 70000"),
        ({}, "", {"run_ahead": "5"}, "--run-ahead must be .*serial"),
        ({}, "", {"device": "tpu"}, "--device must be auto, cpu or cuda"),
        (
            {"RUNAHEAD__EXACT": "on"},
            "",
            {},
            "variable RUNAHEAD__EXACT is not a setting; it is gone: all",
        ),
        ({}, "exact = 'off'", {}, "^key 'exact' in .* is not a setting; it is gone: all kernels are exact$"),
        ({}, "", {"tokenizer": "mine"}, "--tokenizer must be auto or none, and is 'mine'"),
        ({"RUNAHEAD__INSECURE": "perhaps"}, "", {}, "RUNAHEAD__INSECURE must be true or false"),
        ({}, "", {"max_streams": "0"}, "--max-streams must be between 1 and 100000, and is 0"),
        ({}, "", {"shutdown_grace_s": "-1"}, "--shutdown-grace-s must be between 0 and 3600, and is -1"),
        ({}, "", {"shutdown_grace_s": "nan"}, "--shutdown-grace-s must be between 0 and 3600, and is nan"),
        ({}, "", {"log_mode": "drain"}, "--log-mode must be events or barrier, and is 'drain'"),
        ({}, "prefix_cache = 1", {}, "prefix_cache in .* must be true or false"),
        ({"RUNAHEAD__PENALTY_SLOTS": "few"}, "", {}, "RUNAHEAD__PENALTY_SLOTS must be a whole number"),
        ({}, "", {"log_interval": "1.5"}, "--log-interval must be a whole number"),
        ({}, "", {"served_name": "\udcff"}, r"--served-name must be text in UTF-8, and is '\\udcff'"),
        ({}, "", {"launch_timeout_s": "soon"}, "--launch-timeout-s must be a number above 0, at most 604800"),
        ({}, "", {"launch_timeout_s": "0"}, "--launch-timeout-s must be more than 0 and at most 604800, and is 0"),
        ({}, "", {"launch_timeout_s": "inf"}, "--launch-timeout-s must be more than 0 and at most 604800, and is inf"),
        ({}, "", {"max_rows": "-1"}, "--max-rows must be between 0 and 1024, and is -1"),
        ({"RUNAHEAD__MAX_ROWS": "1025"}, "", {}, "RUNAHEAD__MAX_ROWS must be between 0 and 1024, and is 1025"),
        ({}, "max_rows = 1025", {}, "max_rows in .* must be between 0 and 1024, and is 1025"),
        ({}, "", {"run_ahead": "0"}, "--run-ahead must be auto, serial, 1, 2, 3 or 4, and is '0'"),
        ({}, "", {"jitter_seed": "-1"}, "--jitter-seed must be between 0 and 9223372036854775807, and is -1"),
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


FREE_TEXT = {
    *("served_name", "chat_template", "kernel_cache", "tls_cert", "tls_key", "tls_client_ca", "callers"),
    *("host", "health_host", "metrics_host", "otlp_endpoint", "kv_events_host", "kv_events_pod"),
}
"""Settings that take any text: names, addresses, and files that the start opens."""


def takes(name: str, text: str) -> bool:
    return text != "\udcff" and (name in FREE_TEXT or (name == "draft_model" and text == ""))


def refusal_of(flags: Mapping[str, object], environment: Mapping[str, str]) -> str:
    """The sentence that refuses the settings, before anything is started."""
    with pytest.raises((SettingsError, ConfigError)) as refusal:
        msgspec.json.encode(engine_config(load_settings(flags, environment)))  # as they go to the engine
    return str(refusal.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_is_given_is_taken_as_it_is_or_refused_with_a_sentence_that_names_it(name: str) -> None:
    for text in NO_VALUE:
        for flags, environment, spelled in [
            ({name: text}, {}, flag_of(name)),
            ({}, {variable_of(name): text}, variable_of(name)),
        ]:
            if takes(name, text):
                assert chosen(load_settings(flags, environment))[name] == text
                continue
            sentence = refusal_of(flags, environment)
            if name == "model" and text != "\udcff":  # a folder that is not there
                assert sentence.startswith("model is empty" if text == "" else f"model {text[:70]!r}"[:-1])
            else:
                assert sentence.startswith(f"{spelled} must be ")
                assert (ascii(text[:70]).strip("'") or "''") in sentence
            assert "invalid" not in sentence and "codec" not in sentence
            assert len(sentence) < 300 and "\n" not in sentence


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml can't be read: No such file or directory$"):
        load_settings({}, {}, str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    "text", [b"port = [", b"model = \xff", b"a = " + b"[" * 5000], ids=["cut_off", "bytes", "deep"]
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "wrong.toml").write_bytes(text)
    with pytest.raises(SettingsError, match=r"wrong\.toml can't be read"):
        load_settings({}, {}, str(tmp_path / "wrong.toml"))


def test_variables_of_other_programs_are_nobodys_business() -> None:
    assert load_settings({}, {"PATH": "/bin", "RUNAHEADS": "1"}) == Settings()


def test_the_engine_gets_what_was_set(tmp_path: Path) -> None:
    settings = Settings(
        FrontEndSettings(model=str(tmp_path)),
        EngineSettings(run_ahead=0, max_rows=3, threads=1, jitter_seed=9, counters_from=4),
    )
    assert engine_config(settings) == EngineConfig(
        model=str(tmp_path),
        served_name=tmp_path.name,
        spelled=FLAGS,
        run_ahead=0,
        max_rows=3,
        threads=1,
        jitter_seed=9,
        counters_from=4,
    )


def test_every_setting_of_the_engine_reaches_it(tmp_path: Path) -> None:
    flags = {
        "model": str(tmp_path), "served_name": "name", "load_format": "dummy", "device": "cuda", "dtype": "float16",
            "quantize": "fp8", "kv_dtype": "fp8",
        "run_ahead": "serial", "run_ahead_tokens": "600", "max_rows": "8", "max_queue": "9", "context_length": "10",
        "block_size": "32", "num_blocks": "11", "prefill_chunk": "64", "max_prefill_tokens": "65",
        "mixed_prefill_tokens": "66", "token_gap_ms": "67",
        "prefix_cache": "false", "penalty_slots": "5", "log_interval": "1", "log_mode": "barrier", "nvtx": "true",
        "launch_timeout_s": "60.5", "counters_from": "12",
        "kernel_cache": "/kernels", "draft_forced": "false",
    }  # fmt: skip
    config = msgspec.structs.asdict(engine_config(load_settings(flags, {})))
    given = {name: SETTINGS[name].read(text, strict=False) for name, text in flags.items()}
    # These are refused beside device cuda, and tested above and below.
    of_the_cpu = {"threads": 0, "jitter_seed": None, "drafter": "none", "draft_tokens": 0, "draft_model": ""}
    of_the_cpu |= {"state_snapshots": 0, "state_snapshot_blocks": 0, "tensor_parallel": 1}
    of_the_start = {"tokenizer_vocab": 0}  # the check process finds it
    assert config == {**given, **of_the_cpu, **of_the_start, "spelled": FLAGS}


def test_the_number_of_ranks_reaches_the_engine(tmp_path: Path) -> None:
    assert engine_config(load_settings({"model": str(tmp_path), "tensor_parallel": "3"}, {})).tensor_parallel == 3


def test_the_settings_of_snapshots_reach_the_engine(tmp_path: Path) -> None:
    flags = {"model": str(tmp_path), "state_snapshots": "17", "state_snapshot_blocks": "18"}
    config = engine_config(load_settings(flags, {}))
    assert (config.state_snapshots, config.state_snapshot_blocks) == (17, 18)


@pytest.mark.parametrize(("drafts", "count"), [("auto", 0), ("1", 1), ("7", 7)])
def test_the_settings_of_drafts_reach_the_engine(tmp_path: Path, drafts: str, count: int) -> None:
    flags = {"model": str(tmp_path), "drafter": "eagle", "draft_tokens": drafts, "draft_model": "~/head"}
    config = engine_config(load_settings(flags, {}))
    assert (config.drafter, config.draft_tokens) == ("eagle", count)
    assert config.draft_model == str(Path.home() / "head"), "as a model's own folder is found"


def test_a_head_of_no_folder_is_the_bundled_models_and_nobody_elses(tmp_path: Path) -> None:
    for model in ("bundled", str(BUNDLED_FOLDER), str(BUNDLED_FOLDER / ".." / "bundled")):
        assert engine_config(load_settings({"model": model, "drafter": "eagle"}, {})).draft_model == str(BUNDLED_HEAD)
    own = engine_config(load_settings({"drafter": "eagle", "draft_model": str(tmp_path)}, {}))
    assert own.draft_model == str(tmp_path), "who names a folder gets that one"
    assert engine_config(load_settings({"drafter": "ngram"}, {})).draft_model == ""
    for model in (str(tmp_path), "a" * 5000):
        with pytest.raises(ConfigError, match=r"^--drafter eagle needs a head .*: --draft-model names its"):
            engine_config(load_settings({"model": model, "drafter": "eagle"}, {}))


@pytest.mark.parametrize(
    ("flags", "environment", "file_text", "sentence"),
    [
        ({"prefill_chunk": "24"}, {}, "", r"^--prefill-chunk \(24\) must be a multiple of --block-size \(16\)$"),
        ({}, {"RUNAHEAD__BLOCK_SIZE": "24"}, "", "^RUNAHEAD__BLOCK_SIZE must be a power of two, and is 24$"),
        ({"device": "cuda"}, {"RUNAHEAD__THREADS": "3"}, "", r"^RUNAHEAD__THREADS \(3\) .* with --device cuda$"),
        ({}, {}, "num_blocks = 1", r"^num_blocks in .*\.toml must be at least 2 \(one is the null block\), and is 1$"),
        ({"max_rows": "9"}, {}, "num_blocks = 9", r"^--max-rows \(9\) .* 9 \(num_blocks in .*\.toml\) can serve: "),
        ({"log_mode": "barrier"}, {}, "", "^--log-mode barrier has no effect with --log-interval 0: no launch"),
        (
            {"device": "cpu", "dtype": "float16"},
            {},
            "",
            "^--device cpu computes in float32; --dtype float16 can't be combined with it$",
        ),
    ],
)
def test_settings_that_cannot_go_together_are_called_what_the_user_called_them(
    flags: dict[str, object], environment: dict[str, str], file_text: str, sentence: str, config_file: Path
) -> None:
    config_file.write_text(file_text)
    with pytest.raises(ConfigError, match=sentence):
        engine_config(load_settings(flags, environment, str(config_file)))


def test_every_launch_may_be_logged_behind_a_barrier() -> None:
    config = engine_config(Settings(engine=EngineSettings(log_interval=1, log_mode="barrier")))
    assert (config.log_interval, config.log_mode) == (1, "barrier")  # which is serial, and allowed


def test_without_any_setting_the_engine_gets_its_own_defaults() -> None:
    config = engine_config(Settings())
    assert config == EngineConfig(model=config.model, served_name="bundled", spelled=FLAGS)


def test_the_default_model_is_the_one_in_the_package() -> None:
    assert Path(engine_config(Settings()).model).parts[-3:] == ("runtime", "models", "bundled")


def test_a_hub_id_gets_a_sentence_on_how_to_download_it() -> None:
    with pytest.raises(SettingsError, match=r"hf download some-org/Some-Model-1\.5B --local-dir Some-Model-1\.5B"):
        engine_config(Settings(FrontEndSettings(model="some-org/Some-Model-1.5B")))


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"'\./absent' is neither a folder"):
        engine_config(Settings(FrontEndSettings(model="./absent")))


def test_a_file_is_served_under_its_own_name_without_its_end_and_a_link_under_the_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f3a").write_bytes(b"")  # as a download cache keeps files
    link = tmp_path / "SmolLM2-135M.Q4_1.gguf"
    link.symlink_to("blobs/0f3a")
    config = engine_config(Settings(FrontEndSettings(model=str(link))))
    assert (config.model, config.served_name) == (str(link), "SmolLM2-135M.Q4_1")


def test_a_file_that_is_not_there_is_no_hub_id() -> None:
    with pytest.raises(
        SettingsError, match=r"'models/tiny\.gguf' is neither a folder nor a file; give .* or a GGUF file"
    ):
        engine_config(Settings(FrontEndSettings(model="models/tiny.gguf")))


def test_an_empty_model_is_not_the_folder_that_the_service_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert engine_config(Settings(FrontEndSettings(model="."))).model == str(tmp_path)
    with pytest.raises(SettingsError, match="model is empty: give 'bundled'"):
        engine_config(Settings(FrontEndSettings(model="")))


def test_the_engine_is_told_what_its_refusals_call_each_setting(tmp_path: Path) -> None:
    config_file = tmp_path / "\udcff.toml"
    config_file.write_text("block_size = 32")
    environment = {"RUNAHEAD__CONTEXT_LENGTH": "300"}
    settings = load_settings(parse("--device", "cuda", f"--model={tmp_path}"), environment, str(config_file))
    config = engine_config(settings)
    names = ("device", "context_length", "block_size", "num_blocks")
    in_the_file = f"block_size in {tmp_path}/\\udcff.toml"
    assert [*map(config.spelling, names)] == ["--device", "RUNAHEAD__CONTEXT_LENGTH", in_the_file, "--num-blocks"]
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config, "as it goes to the engine"
    assert [*map(EngineConfig(model="").spelling, names)] == [*names], "whoever has not said how is told the name"
