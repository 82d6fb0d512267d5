"""`runahead trace`: figures, a timeline for Perfetto and a picture, of a real service and of what a test makes up."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from benchmarks.local_service import LocalService, local_service
from runahead.service import cli
from runahead.service.commands.chain_picture import SHOWN, picture
from runahead.service.commands.timeline import STAGES, Timeline, timeline_of
from runahead.service.commands.trace_command import figures
from runahead.service.stats.trace import as_response
from runahead.v1 import GenerateRequest, GenerationServiceStub, StoppingOptions
from tests.service.stats.test_trace import TRACED, launch

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with local_service(["--threads", "1", "--num-blocks", "600"]) as running:
        yield running


@pytest.fixture(scope="module")
def decoded(service: LocalService) -> LocalService:
    """It has answered something."""
    with grpc.insecure_channel(service.url) as channel:
        request = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=60, ignore_eos=True))
        assert list(GenerationServiceStub(channel).Generate(request, timeout=60))[-1].HasField("finished")
    return service


MADE_UP = timeline_of(as_response(TRACED, shares_clock=False))


def test_before_the_first_launch_it_says_so(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--url", service.url]) == 1
    assert capsys.readouterr().err == "runahead trace: no launch was made yet\n"


def test_figures_are_printed(decoded: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--url", decoded.url, "--launches", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["launches", "overlap", "step", "idle", *STAGES, "clocks"]
    assert re.fullmatch(r"launches  \d+ to \d+: 1 closing, 39 decode", lines[0])
    assert re.fullmatch(r"overlap   \d+ of 39 that could were enqueued while the one before ran", lines[1])


def test_figures_are_right() -> None:
    lines = figures(MADE_UP)
    assert lines[0] == "launches  1 to 5: 5 decode"
    assert lines[2] == "step      600.0 µs in the median, 600.0 at most"
    assert lines[3] == "idle      0.0 µs in the median, 0.0 at most between launches; inside them 8 µs of 3000"
    assert lines[4] == "plan      50.0 µs in the median, 50.0 at most"
    one = timeline_of(as_response(type(TRACED)(TRACED.launches[:1], ()), shares_clock=False))
    assert figures(one)[2:4] == ["step      none", "idle      none between launches; inside them 2 µs of 600"]


def test_the_timeline_has_the_lanes_the_tokens_and_the_arrows(
    decoded: LocalService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert cli.main(["trace", "--url", decoded.url, "--launches", "20", "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(lanes) == ["host", "device", "tokens seen"]
    slices = [event for event in events if event["ph"] == "X"]
    on_device = [event for event in slices if event["tid"] == lanes["device"]]
    assert len(on_device) == 20
    assert [event["args"]["launch"] for event in on_device] == sorted(event["args"]["launch"] for event in on_device)
    on_host = {event["name"] for event in slices if event["tid"] == lanes["host"]}
    assert on_host == {"wait", *STAGES}
    assert all(event["dur"] >= 0 for event in slices)
    assert len([event for event in events if event["ph"] == "i"]) == 20
    begins, ends = ({event["id"]: event["ts"] for event in events if event["ph"] == phase} for phase in "sf")
    assert begins.keys() == ends.keys() == {event["args"]["launch"] for event in on_device}


def test_the_picture_is_an_image_of_some_launches(
    decoded: LocalService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chain.svg"
    assert cli.main(["trace", "--url", decoded.url, "--picture", str(path)]) == 0
    root = ET.parse(path).getroot()
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert len([title for title in titles if re.match(r"(decode|mixed|closing) launch \d+: ", title)]) >= SHOWN
    assert [title for title in titles if title.startswith("tokens of launch")]
    assert [text for element in root.iter(f"{SVG}text") if (text := element.text or "").startswith(decoded.url)]


def test_the_picture_shows_launches_that_are_like_the_others() -> None:
    """The first steps are slow, and one in the middle."""
    begins = [0, 5000, 9000, 9600, 10200, 14000, 14600, 15200, 15800, 16400, 17000]
    traced = type(TRACED)(tuple(launch(number, begin) for number, begin in enumerate(begins, 1)), ())
    root = ET.fromstring(picture([("a", timeline_of(as_response(traced, shares_clock=False)))]))
    shown = {element.text for element in root.iter(f"{SVG}text") if element.get("fill") == "#ffffff"}
    assert shown == {"6", "7", "8", "9", "10"}


def test_two_timelines_are_drawn_to_one_scale() -> None:
    slow = Timeline(tuple(MADE_UP.launches), MADE_UP.waits, 0.0)
    root = ET.fromstring(picture([("serial", slow), ("run_ahead=2", MADE_UP)], "a caption"))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert [text for text in texts if text.startswith(("serial:", "run_ahead=2:"))] == [
        "serial: a step takes 600 µs, the device is idle for 0 of them",
        "run_ahead=2: a step takes 600 µs, the device is idle for 0 of them",
    ]
    assert "a caption" in texts


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--launches", "many"], 2, "--launches many is no number of launches"),
        (["--launches", "-1"], 2, "--launches -1 is no number of launches"),
        (["--launches", "0"], 1, "launches must be 1 to 256, and is 0"),
        (["--timeout", "soon"], 2, "--timeout"),
        (["--out", "/nowhere/t.json"], 1, "/nowhere/t.json can't be written: No such file or directory"),
    ],
)
def test_what_goes_wrong_is_said_by_name(
    flags: list[str], status: int, said: str, decoded: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "--url", decoded.url, *flags]) == status
    assert said in capsys.readouterr().err
