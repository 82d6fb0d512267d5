"""The command line, against a server that plays a script."""

from __future__ import annotations

import argparse
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service import cli
from runahead.service.commands.request_flags import add_flags
from runahead.service.settings.server_config import ServerConfig
from runahead.service.settings.settings import SETTINGS, FrontEndSettings, flag_of
from runahead.v1 import generate_pb2, generation_service_pb2_grpc, model_pb2


class ScriptedService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Streams two deltas and an end; or, by the prompt's text, refuses or goes on until cancelled."""

    def __init__(self) -> None:
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.text == "endless":  # asked before anything is sent: the client may cancel at its first sight
            context.add_callback(self.cancelled.set)
        if request.text == "refuse":
            violation = error_details_pb2.BadRequest.FieldViolation(
                field="sampling.top_p", description="sampling.top_p must be above 0"
            )
            other = error_details_pb2.BadRequest.FieldViolation(field="top_k", description="top_k must be 0 or more")
            status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="sampling.top_p must be above 0")
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation, other]))
            context.abort_with_status(rpc_status.to_status(status))
        if request.text == "several":
            for index, text in ((0, "a"), (1, "b"), (0, "c"), (1, "d")):
                yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text=text, index=index))
            for index in (1, 0):
                yield generate_pb2.GenerateResponse(finished=generate_pb2.Finished(index=index, seed=11 + index))
            return
        yield generate_pb2.GenerateResponse(accepted=generate_pb2.Accepted(request_id="r", prompt_tokens=3))
        for prompt in self._prompt(request.output):
            yield generate_pb2.GenerateResponse(prompt=prompt)
        special = generate_pb2.Token(id=90_000)  # a padded vocabulary has ids that no token belongs to
        yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text="    return ", tokens=[special]))
        if request.text == "accents":
            yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text="café"))
        if request.text == "endless":
            self.cancelled.wait()
            return
        token = generate_pb2.Token(id=7, bytes=b"42", logprob=-0.5)
        yield generate_pb2.GenerateResponse(delta=generate_pb2.Delta(text="42", tokens=[token]))
        finished = generate_pb2.Finished(
            reason=generate_pb2.FINISH_REASON_STOP,
            stop=generate_pb2.MatchedStop(text="\n"),
            seed=11,
            usage=generate_pb2.Usage(prompt_tokens=3, completion_tokens=21, drafted_tokens=9, accepted_tokens=7),
        )
        finished.timing.queue.FromMilliseconds(3)
        finished.timing.first_token.FromMilliseconds(8)
        finished.timing.decode.FromMilliseconds(100)
        yield generate_pb2.GenerateResponse(finished=finished)

    def GetModelInfo(self, request: Any, context: Any) -> model_pb2.GetModelInfoResponse:
        return model_pb2.GetModelInfoResponse(has_tokenizer=True)

    def _prompt(self, output: Any) -> Iterator[generate_pb2.Prompt]:
        """Two events, cut inside a character."""
        pieces = [(5, b"caf\xc3", None), (6, b"\xa9:", -1.25)]
        if output.echo or output.HasField("prompt_logprobs"):
            for offset, (token_id, spelled, logprob) in enumerate(pieces):
                token = generate_pb2.Token(id=token_id, bytes=spelled)
                if output.HasField("prompt_logprobs") and logprob is not None:
                    token.logprob = logprob
                    token.top.add(id=9, bytes=b"!", logprob=-0.5)
                yield generate_pb2.Prompt(offset=offset, tokens=[token])


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_the_text_goes_to_standard_output_and_the_end_to_standard_error(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "def f():\n", "--url", url]) == 0
    printed = capsys.readouterr()
    assert printed.out == "    return 42\n"
    assert "STOP '\\n', 3 prompt tokens (0 cached), 21 completion tokens, 7 of 9 drafts right, seed 11" in printed.err
    assert "first token after 8 ms (3 queued), then 200 tokens/s" in printed.err


@pytest.mark.parametrize(("temperature", "has_seed"), [("0", False), ("0.5", True)])
def test_the_seed_is_said_where_it_has_drawn_tokens(
    url: str, capsys: pytest.CaptureFixture[str], temperature: str, has_seed: bool
) -> None:
    assert cli.main(["generate", "def f():\n", "--url", url, "--temperature", temperature]) == 0
    assert ("seed 11" in capsys.readouterr().err) is has_seed


def test_each_of_several_completions_is_printed_when_it_has_ended(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "several", "--n", "2", "--url", url]) == 0
    printed = capfd.readouterr()
    assert printed.out == "bd\nac\n"
    lines = printed.err.splitlines()
    assert lines[0::2] == ["[completion 1]", "[completion 0]"]
    assert "seed 12" in lines[1] and "seed 11" in lines[3]


@pytest.mark.parametrize("prompt", [["def f():\n"], ["--token-ids", "10,11"]], ids=["text", "ids"])
def test_a_token_without_bytes_leaves_nothing_in_the_text_of_a_server_with_a_tokenizer(
    url: str, capsys: pytest.CaptureFixture[str], prompt: list[str]
) -> None:
    assert cli.main(["generate", *prompt, "--url", url]) == 0
    assert capsys.readouterr().out == "    return 42\n"


def test_the_prompt_comes_from_standard_input_where_none_is_given(
    url: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert cli.main(["generate", "--url", url]) == 0
    assert service.requests[0].text == "piped"


def test_a_flag_that_is_not_given_stays_unset(url: str, service: ScriptedService) -> None:
    cli.main(["generate", "hello", "--url", url])
    assert service.requests == [generate_pb2.GenerateRequest(text="hello")]


def test_every_flag_reaches_its_field(url: str, service: ScriptedService) -> None:
    flags = (
        "--request-id name --temperature 0.5 --top-k 4 --top-p 0.25 --min-p 0.125 --seed 18446744073709551615 "
        "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty 0.75 --logit-bias 1=-2,3=0.5 "
        "--allowed-token-ids 4,5 --max-tokens 6 --min-tokens 2 --stop a --stop bc --stop-token-ids 8,9 --ignore-eos "
        "--include-stop --logprobs 0 --prompt-logprobs 1 --echo --max-tokens-per-message 3 --cache-salt s "
        "--priority -1 --n 3 --no-add-special-tokens"
    ).split()
    assert cli.main(["generate", "--url", url, "--token-ids", "10,11", *flags]) == 0
    sent = service.requests[0]
    assert sent == generate_pb2.GenerateRequest(
        request_id="name",
        token_ids=generate_pb2.TokenIds(ids=[10, 11]),
        sampling=generate_pb2.SamplingOptions(
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            seed=18446744073709551615,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=0.75,
            logit_bias={1: -2.0, 3: 0.5},
            allowed_token_ids=[4, 5],
        ),
        stopping=generate_pb2.StoppingOptions(
            max_tokens=6, min_tokens=2, stop=["a", "bc"], stop_token_ids=[8, 9], ignore_eos=True, include_stop=True
        ),
        output=generate_pb2.OutputOptions(logprobs=0, prompt_logprobs=1, echo=True, max_tokens_per_message=3),
        cache_salt="s",
        priority=-1,
        n=3,
        add_special_tokens=False,
    )
    for group in ("sampling", "stopping", "output"):
        part = getattr(sent, group)
        assert len(part.ListFields()) == len(part.DESCRIPTOR.fields), f"this test must set every field of {group}"


def test_log_probabilities_go_to_standard_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["generate", "x", "--url", url, "--logprobs", "0"])
    assert "[7 b'42' -0.5000]" in capsys.readouterr().err


def test_an_echoed_prompt_stands_before_the_completion(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["generate", "x", "--url", url, "--echo"])
    printed = capsys.readouterr()
    assert printed.out == "café:    return 42\n"
    assert "[5 " not in printed.err


def test_log_probabilities_of_the_prompt_go_to_standard_error_alone(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["generate", "x", "--url", url, "--prompt-logprobs", "1"])
    printed = capsys.readouterr()
    assert printed.out == "    return 42\n"
    assert "[5 b'caf\\xc3']\n[6 b'\\xa9:' -1.2500  b'!' -0.5000]\n" in printed.err


def test_a_refusal_names_each_field_once(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "refuse", "--url", url]) == 1
    printed = capsys.readouterr().err
    assert printed == "runahead generate: INVALID_ARGUMENT: sampling.top_p must be above 0\n  top_k must be 0 or more\n"


def test_without_a_server_the_answer_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x", "--url", "127.0.0.1:1"]) == 1
    sentence = "runahead generate: no server answers at 127.0.0.1:1; start one with `runahead serve`\n"
    assert capsys.readouterr().err == sentence, "and no empty line before it, where no text stands"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            ["--top-k", "99999999999"],
            "--top-k must be a whole number from -2147483648 to 2147483647, and is '99999999999'",
        ),
        (["--temperature", "warm"], "--temperature must be a number, and is 'warm'"),
        (
            ["--logit-bias", "5"],
            "--logit-bias must be whole numbers from 0 to 4294967295, each with a number, as ID=VALUE,ID=VALUE",
        ),
        (["--token-ids", "1"], "a prompt and --token-ids can't be given together"),
    ],
)
def test_a_value_that_cannot_be_is_named_and_nothing_is_sent(
    flags: list[str], named: str, url: str, service: ScriptedService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "x", "--url", url, *flags]) == 2
    assert named in capsys.readouterr().err
    assert not service.requests


def test_an_interrupt_cancels_the_call(url: str, service: ScriptedService) -> None:
    command = [sys.executable, "-m", "runahead", "generate", "endless", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.read(11) == b"    return "
        client.send_signal(signal.SIGINT)
        _, errors = client.communicate(timeout=30)
    assert client.returncode == 130
    assert b"interrupted" in errors
    assert service.cancelled.wait(30)


def test_a_reader_that_goes_away_ends_the_client_without_a_traceback(url: str) -> None:
    command = f"'{sys.executable}' -m runahead generate hello --url {url} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_an_output_without_room_is_named_and_the_call_ends(url: str, service: ScriptedService) -> None:
    command = f"'{sys.executable}' -m runahead generate endless --url {url} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    sentence = "runahead: standard output can't be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, sentence)
    assert service.cancelled.wait(30)


def test_a_prompt_that_is_not_utf8_is_a_usage_error(url: str, service: ScriptedService) -> None:
    command = [sys.executable, "-m", "runahead", "generate", "--url", url]
    for encoding in ("utf-8", "utf-8:surrogateescape"):
        environment = {"PYTHONIOENCODING": encoding}
        done = subprocess.run(command, input=b"\xff", capture_output=True, env=environment, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (2, b"runahead generate: the prompt is not UTF-8\n")
    assert not service.requests


def test_a_terminal_that_cannot_show_a_character_gets_the_rest(url: str) -> None:
    command = [sys.executable, "-m", "runahead", "generate", "accents", "--url", url]
    environment = {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"    return caf?42\n")


def test_every_field_of_the_request_has_a_flag_with_a_help_text() -> None:

    parser = argparse.ArgumentParser()
    add_flags(parser)  # a field without a help text raises KeyError
    assert "--max-tokens-per-message" in parser.format_help()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--prot", "1"], "runahead serve: --prot is not a flag; did you mean --port?"),
        (["serve", "--port=1", "--max-row=2"], "--max-row is not a flag; did you mean --max-rows?"),
        (["serve", "--zzz"], "runahead serve: --zzz is not a flag (see runahead serve --help)"),
        (["serve", "--exact", "on"], "runahead serve: --exact is not a flag; it is gone: all kernels are exact (see"),
        (["serve", "now"], "runahead serve: unexpected argument 'now'"),
        (["generate", "x", "--temprature", "1"], "runahead generate: --temprature is not a flag; did you mean --temp"),
        (["--versoin"], "runahead: --versoin is not a flag; did you mean --version?"),
        (["srve"], "runahead: 'srve' is not a command; did you mean serve?"),
        (["completion", "bsh"], "bsh"),
        (["serve", "--port", "70000"], "--port must be between 0 and 65535, and is 70000"),
        (["serve", "--device", "tpu"], "--device must be auto, cpu or cuda"),
        (["serve", "--host", "0.0.0.0"], "--insecure"),
        (["serve", "--model", "some-org/some-model"], "hf download some-org/some-model"),
        (["serve", "--max-rows", "1025"], "--max-rows must be between 0 and 1024, and is 1025"),
        (["serve", "--penalty-slots", "-1"], "--penalty-slots must be between 0 and 1024, and is -1"),
        (["serve", "--log-interval", "-1"], "--log-interval must be between 0 and 1073741824, and is -1"),
        (["serve", "--log-mode", "drain"], "--log-mode must be events or barrier"),
        (["serve", "--prefill-chunk", "24"], "--prefill-chunk (24) must be a multiple of --block-size (16)"),
        (["serve", "--num-blocks", "1"], "--num-blocks must be at least 2 (one is the null block), and is 1"),
        (
            ["serve", "--device=cpu", "--dtype=bfloat16"],
            "--device cpu computes in float32; --dtype bfloat16 can't be combined",
        ),
        (["serve", "--config", "absent.toml"], "absent.toml"),
        (["juggle"], "runahead: 'juggle' is not a command (see runahead --help)"),
        ([], "COMMAND"),
    ],
)
def test_an_unknown_or_impossible_setting_exits_2_with_a_sentence_that_names_it(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr().err
    assert code == 2
    assert named in printed
    assert len(printed.strip().splitlines()) == 1


def test_an_unknown_variable_exits_2_with_a_sentence_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNAHEAD__DEPTH", "3")
    assert cli.main(["serve"]) == 2
    assert "RUNAHEAD__DEPTH is not a setting" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("runahead ")


def test_every_setting_reaches_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[ServerConfig] = []

    def run(config: ServerConfig) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("runahead.service.processes.server.run", run)
    monkeypatch.delenv("RUNAHEAD__DEVICE")
    flags = [f"--model={tmp_path}", "--host=::", "--insecure", "--port=1", "--max-streams=2", "--log-level=error"]
    flags += ["--shutdown-grace-s=0.5", "--tokenizer=none", "--log-format=json"]
    assert cli.main(["serve", *flags, "--run-ahead=serial", "--max-rows=3"]) == 0
    engine = EngineConfig(
        model=str(tmp_path),
        served_name=tmp_path.name,
        run_ahead=0,
        max_rows=3,
        spelled={name: flag_of(name) for name in SETTINGS},
    )
    front_end = FrontEndSettings(
        model=str(tmp_path),
        tokenizer="none",
        host="::",
        port=1,
        insecure=True,
        max_streams=2,
        log_level="error",
        log_format="json",
        shutdown_grace_s=0.5,
    )
    assert started == [ServerConfig(engine, front_end)]
