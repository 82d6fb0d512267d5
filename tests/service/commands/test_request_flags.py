"""A value that a flag of `runahead generate` can't take is refused with a sentence, before anything is sent."""

from __future__ import annotations

import pytest

from runahead.service.commands.client_channel import add_connection_flags, check_url
from runahead.service.commands.request_flags import UsageError, add_flags, build_request, seconds_of
from runahead.service.settings.cli_parser import Parser

NO_VALUE = ["x", "1.5.", "-", "9" * 30, "9" * 5000, "1=", "=1", "\udcff"]


def flags_with_a_value() -> list[str]:
    parser = Parser()
    add_flags(parser)
    own = [action.option_strings[0] for action in parser.actions if action.option_strings and action.nargs != 0]
    return ["--url", *own]


@pytest.mark.parametrize("text", NO_VALUE, ids=lambda text: ascii(text[:6]))
@pytest.mark.parametrize("flag", flags_with_a_value())
def test_a_value_is_taken_or_refused_with_a_sentence_that_names_it(flag: str, text: str) -> None:
    parser = Parser()
    add_flags(parser)
    add_connection_flags(parser)
    prompt = [] if flag == "--token-ids" else ["prompt", *(["--chat"] if flag == "--system" else [])]
    parsed = parser.parse_args([*prompt, f"{flag}={text}"])
    try:
        check_url(parsed.url)
        if parsed.timeout is not None:
            seconds_of(parsed.timeout)
        build_request(parsed)
    except UsageError as refusal:
        sentence = str(refusal)
        assert sentence.startswith(f"{flag} must be ")
        assert text[:70] in sentence or ascii(text).strip("'") in sentence
        assert "invalid" not in sentence and "codec" not in sentence and "literal" not in sentence
        assert len(sentence) < 300
    else:
        takes_text = {"--url", "--request-id", "--cache-salt", "--stop", "--system"}
        number = text[:1] == "9" and flag in {
            *("--temperature", "--top-p", "--min-p"),
            *("--repetition-penalty", "--presence-penalty", "--frequency-penalty"),
        }  # whatever its size, a number for the server to judge
        assert number or (flag in takes_text and text != "\udcff")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300", "soon"])
def test_a_time_limit_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--timeout must be a number of seconds above 0, at most 31536000, and is"):
        seconds_of(text)


def test_a_time_limit_is_in_seconds() -> None:
    assert seconds_of("1.5") == 1.5


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(UsageError, match="--url must be HOST:PORT, and is ''"):
        check_url("")
