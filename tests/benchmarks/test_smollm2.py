"""The demo on a GGUF file and the comparison with transformers, on a tiny file through the real service."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.smollm2 import demo, parity
from benchmarks.smollm2.file import NotInstalled, smollm2_file
from tests.runtime.checkpoint.gguf_files import llama, write
from tests.service.commands.chat_service import ChatService, serving

CHANGES = {"tokenizer.ggml.pre": "gpt-2"}  # a way of cutting texts that transformers has of the file too
ASKED = ([{"role": "user", "content": "in the hut"}], [{"role": "user", "content": "1212, the the?"}])
TOKENS = 24


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama(), Kind.Q4_1, CHANGES)


@pytest.mark.timeout(400)  # a start of the service may take 120 s on a busy machine, and transformers loads beside it
def test_a_gguf_file_through_the_service_gives_the_tokens_of_transformers(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity.compare(file, ASKED, TOKENS) == []
    assert capsys.readouterr().out.count(f"{TOKENS} of {TOKENS} tokens equal") == len(ASKED)


def test_other_weights_are_noticed(file: Path, tmp_path: Path) -> None:
    (expected,) = parity.of_transformers(file, ASKED[:1], TOKENS)
    other = write(tmp_path / "tiny.gguf", llama(seed=1), Kind.Q4_1, CHANGES)
    (found,) = parity.of_transformers(other, ASKED[:1], TOKENS)
    assert parity.differences(expected, expected) == []
    assert len(parity.differences(expected, found)) > TOKENS // 2
    assert expected.margin > 0


@pytest.mark.parametrize(("named", "reason"), [("two", ""), ("Paris", "the answers do not name Paris")])
def test_the_questions_of_the_demo_are_answered_in_turn_and_one_names_what_it_must(
    named: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ChatService()
    with serving(service) as url:
        assert demo.converse(url, ("one", "two"), named) == reason
        assert len(service.prompts) == 2 and "one" in service.prompts[1], "what was said before"
    assert "> one\n> two\nYou said one.\nYou said two.\n" in capsys.readouterr().out


def test_a_file_that_is_not_there_fails_the_demo_with_the_service_s_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--file", "absent.gguf"]) == 1
    assert "'absent.gguf' is neither a folder nor a file" in capsys.readouterr().out


def test_without_the_package_a_sentence_says_how_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.smollm2.file.PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(NotInstalled, match="`make demo MODEL=smollm2` installs it"):
        smollm2_file()
