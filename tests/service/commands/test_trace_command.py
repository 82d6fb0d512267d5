"""`runahead trace`: figures, a timeline for Perfetto and a picture, of a real service and of what a test makes up."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest

from benchmarks.local_service import LocalService, local_service
from runahead.service import cli
from runahead.service.commands.chain_picture import SHOWN, STAGES, picture
from runahead.service.commands.trace_command import chrome_trace, each_launch, figures
from runahead.service.stats.trace import as_response
from runahead.v1 import GenerateRequest, GenerationServiceStub, StoppingOptions, TraceResponse
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


MADE_UP = as_response(TRACED, shares_clock=False)


def test_before_the_first_launch_it_says_so(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--url", service.url]) == 1
    assert capsys.readouterr().err == "runahead trace: no launch was made yet\n"


def test_figures_are_printed(decoded: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--url", decoded.url, "--launches", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = ["closing", "decode"]
    assert [line.split()[0] for line in lines] == ["launches", "overlap", "step", "idle", *kinds, *STAGES, "clocks"]
    assert re.fullmatch(r"launches  \d+ to \d+: 1 closing, 39 decode", lines[0])
    assert re.fullmatch(
        r"overlap   \d+ of 39 that could were enqueued while the one before ran(, the others up to .*)?", lines[1]
    )


def test_figures_are_right() -> None:
    lines = figures(MADE_UP)
    assert lines[0] == "launches  1 to 5: 5 decode"
    assert lines[2] == "step      600.0 µs in the median, 600.0 at most"
    assert lines[3] == "idle      0.0 µs in the median, 0.0 at most between two launches"
    assert lines[4] == "  decode  0 µs before and at most 8 µs inside, of 3000 µs: 0.2 %"
    assert lines[5] == "plan      50.0 µs in the median, 50.0 at most"
    one = as_response(type(TRACED)(TRACED.launches[:1], ()), shares_clock=False)
    assert figures(one)[2:5] == [
        "step      none",
        "idle      none between two launches",
        "  decode  0 µs before and at most 2 µs inside, of 600 µs: 0.2 %",
    ]


def test_idle_time_counts_for_the_kind_of_launch_that_was_waited_for() -> None:
    """A mixed launch 100 µs late, with gaps inside, a decode one 50 µs late, and one after a time without work."""
    timeline = TraceResponse(launches=MADE_UP.launches[:4])
    _, mixed, _, later = timeline.launches
    mixed.kind, mixed.prompt_tokens, later.first_after_idle = "mixed", 700, True
    times = ((0, 600, 0), (700, 1600, 80), (1650, 2250, 0), (9000, 9600, 0))
    for each, (begin, end, inside) in zip(timeline.launches, times, strict=True):
        each.device.begin.FromMicroseconds(begin)
        each.device.end.FromMicroseconds(end)
        each.idle_inside.FromMicroseconds(inside)
    lines = figures(timeline)
    assert lines[3] == "idle      75.0 µs in the median, 100.0 at most between two launches"
    assert lines[4:6] == [
        "  decode  50 µs before and at most 0 µs inside, of 1850 µs: 2.7 %",
        "  mixed   100 µs before and at most 80 µs inside, of 1000 µs: 18.0 %",
    ]
    assert [line.split() for line in each_launch(timeline)] == [
        ["launch", "kind", "rows", "prompt", "device", "µs", "idle", "before", "inside"],
        ["1", "decode", "8", "0", "600.0", "-", "0.0"],
        ["2", "mixed", "8", "700", "900.0", "100.0", "80.0"],
        ["3", "decode", "8", "0", "600.0", "50.0", "0.0"],
        ["4", "decode", "8", "0", "600.0", "-", "0.0"],
    ]


def test_a_line_for_each_launch_stands_before_the_figures(
    decoded: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "--url", decoded.url, "--launches", "7", "--each"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "launch" and lines[8].startswith("launches")
    numbers = [int(line.split()[0]) for line in lines[1:8]]
    assert numbers == list(range(numbers[0], numbers[0] + 7))


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


def of_two_ranks() -> TraceResponse:
    made = TraceResponse()
    made.CopyFrom(MADE_UP)
    for each in made.launches:
        other = each.other_ranks.add(begin=each.device.begin, end=each.device.end)
        other.begin.FromNanoseconds(other.begin.ToNanoseconds() + 50_000)
    return made


def test_the_device_of_each_other_rank_has_a_lane() -> None:
    launches = of_two_ranks().launches
    events = chrome_trace(of_two_ranks())["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(lanes) == ["host", "device", "tokens seen", "device of rank 1"]
    found = [event for event in events if event["ph"] == "X" and event["tid"] == lanes["device of rank 1"]]
    assert [event["args"]["launch"] for event in found] == [launch.number for launch in launches]
    assert all(event["dur"] == pytest.approx(550, abs=0.01) for event in found)


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
    root = ET.fromstring(picture([("a", as_response(traced, shares_clock=False))]))
    shown = {element.text for element in root.iter(f"{SVG}text") if element.get("fill") == "#ffffff"}
    assert shown == {"6", "7", "8", "9", "10"}


def labels(drawn: str) -> list[tuple[float, float, float, str]]:
    """Of each text of a picture its left and right end, its base and its words, by letters of the widest kind."""
    found = []
    for element in ET.fromstring(drawn).iter(f"{SVG}text"):
        words, x = element.text or "", float(element.attrib["x"])
        left = x - 4 * len(words) if element.get("text-anchor") == "middle" else x
        found.append((left, left + 8 * len(words), float(element.attrib["y"]), words))
    return found


def test_no_label_of_a_picture_lies_on_another() -> None:
    """Long numbers of launches that are enqueued one right after the other, and of some that hardly take time."""
    at_once = [launch(123_456 + place, 600 * place, enqueued_s=1000 + (1500 + place) * 1e-6) for place in range(6)]
    short = [launch(123_456 + place, 600 * place) for place in range(6)]
    short = [msgspec.structs.replace(each, end_ns=each.start_ns + 20_000) for each in short]
    panels = [
        (name, as_response(type(TRACED)(tuple(launches), ()), shares_clock=False))
        for name, launches in (("at once", at_once), ("short", short))
    ]
    found = labels(picture(panels))
    assert [words for *_, words in found].count("123456") < 4, "some are left out"
    for place, (left, right, base, words) in enumerate(found):
        for other_left, other_right, other_base, others in found[place + 1 :]:
            assert abs(base - other_base) >= 13 or right <= other_left or other_right <= left, (words, others)


def test_the_picture_has_a_lane_for_the_device_of_each_other_rank() -> None:
    drawn = picture([("two", of_two_ranks()), ("one", MADE_UP)])
    base = {words.partition(":")[0]: at for _, _, at, words in labels(drawn)}
    assert base["two"] < base["rank 1"] < base["one"]
    titles = [element.text or "" for element in ET.fromstring(drawn).iter(f"{SVG}title")]
    assert [title for title in titles if "on rank" in title] == [
        f"decode launch {launch.number} on rank 1: 550 µs" for launch in MADE_UP.launches
    ]


def test_a_picture_has_a_legend_of_its_colours_and_marks() -> None:
    drawn = picture([("a", MADE_UP)])
    words = [words for *_, words in labels(drawn)]
    for meaning in ("host at work", "device runs a launch", "device is idle", "launch N: enqueued, begins"):
        assert meaning in words
    assert "its tokens reach the host" in words


def test_times_of_six_digits_are_in_milliseconds() -> None:
    slow = type(TRACED)(tuple(launch(number, 200_000 * number) for number in range(1, 6)), ())
    words = " ".join(words for *_, words in labels(picture([("a", as_response(slow, shares_clock=False))])))
    assert "a step takes 200 ms, the device is idle for 199.4 ms of it" in words
    assert "µs" not in words
    assert "200 ms" in words and "ms" not in " ".join(words for *_, words in labels(picture([("a", MADE_UP)])))


def test_two_timelines_are_drawn_to_one_scale() -> None:
    root = ET.fromstring(picture([("serial", MADE_UP), ("run_ahead=2", MADE_UP)]))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert [text for text in texts if text.startswith(("serial:", "run_ahead=2:"))] == [
        "serial: a step takes 600 µs, the device is idle for 0 µs of it",
        "run_ahead=2: a step takes 600 µs, the device is idle for 0 µs of it",
    ]


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--launches", "many"], 2, "--launches many is not a number of launches"),
        (["--launches", "-1"], 2, "--launches -1 is not a number of launches"),
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
