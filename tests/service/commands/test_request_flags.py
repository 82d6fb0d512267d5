"""A value that a flag of `runahead generate` can't take is refused with a sentence, before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from runahead.service.commands.client_channel import add_connection_flags, check_url
from runahead.service.commands.request_flags import UsageError, add_flags, build_request, seconds_of, system_of
from runahead.service.settings.cli_parser import Parser
from runahead.v1 import GenerateRequest

NO_VALUE = ["x", "1.5.", "-", "9" * 30, "9" * 5000, "1=", "=1", "\udcff"]


def flags_with_a_value() -> list[str]:
    parser = Parser()
    add_flags(parser)
    own = [action.option_strings[0] for action in parser.actions if action.option_strings and action.nargs != 0]
    return ["--url", *own]


TEXT = {"--url", "--request-id", "--cache-salt", "--stop", "--system", "--regex", "--choice"}
NUMBERS = {
    *("--temperature", "--top-p", "--min-p"),
    *("--repetition-penalty", "--presence-penalty", "--frequency-penalty"),
}


def takes(flag: str, text: str) -> bool:
    """Text may be any but what is no UTF-8, a number of any size: the server judges both."""
    return text != "\udcff" and (flag in TEXT or (flag in NUMBERS and text[0] == "9"))


def parsed_request(flag: str, text: str) -> tuple[GenerateRequest, str]:
    """The request of a command with this flag, and the text that is kept beside it. Raises UsageError."""
    parser = Parser()
    add_flags(parser)
    add_connection_flags(parser)
    prompt = [] if flag == "--token-ids" else ["prompt", *(["--chat"] if flag == "--system" else [])]
    parsed = parser.parse_args([*prompt, f"{flag}={text}"])
    check_url(parsed.url)
    if parsed.timeout is not None:
        seconds_of(parsed.timeout)
    return build_request(parsed), f"{parsed.url} {system_of(parsed)}"


@pytest.mark.parametrize("flag", flags_with_a_value())
def test_a_value_is_taken_or_refused_with_a_sentence_that_names_it(flag: str) -> None:
    for text in NO_VALUE:
        if takes(flag, text):
            request, beside = parsed_request(flag, text)
            if flag in NUMBERS:
                field = getattr(request.sampling, flag[2:].replace("-", "_"))
                assert field == pytest.approx(float(text))
            else:
                assert text.encode() in request.SerializeToString() + beside.encode()
            continue
        with pytest.raises(UsageError) as refusal:
            parsed_request(flag, text)
        sentence = str(refusal.value)
        assert sentence.startswith(f"{flag} must be ")
        assert ascii(text[:70]).strip("'") in sentence
        assert "invalid" not in sentence and "codec" not in sentence and "literal" not in sentence
        assert len(sentence) < 300


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300", "soon"])
def test_a_time_limit_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--timeout must be a number of seconds above 0, at most 31536000, and is"):
        seconds_of(text)


def test_a_time_limit_is_in_seconds() -> None:
    assert seconds_of("1.5") == 1.5


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(UsageError, match="--url must be HOST:PORT, and is ''"):
        check_url("")


def request_of(*flags: str) -> GenerateRequest:
    parser = Parser()
    add_flags(parser)
    return build_request(parser.parse_args(["prompt", *flags]))


def test_a_structure_is_taken_from_its_flag_or_from_the_file_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}', encoding="utf-8")
    assert not request_of().HasField("structure")
    assert request_of("--json-schema", str(file)).structure.json_schema == '{"type": "string"}'
    assert request_of("--grammar", str(file)).structure.grammar == '{"type": "string"}'
    assert request_of("--ebnf", str(file)).structure.ebnf == '{"type": "string"}'
    assert request_of("--json-object").structure.json_object
    assert request_of("--regex", "a+").structure.regex == "a+"
    assert list(request_of("--choice", "yes", "--choice", "no").structure.choice.texts) == ["yes", "no"]


def test_two_structures_and_a_file_that_can_t_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--regex and --choice can't be given together"):
        request_of("--choice", "a", "--regex", "b")
    with pytest.raises(UsageError, match=r"--grammar must be a file that can be read, and is .*: No such file"):
        request_of("--grammar", str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        request_of("--json-schema", str(tmp_path / "bytes"))
