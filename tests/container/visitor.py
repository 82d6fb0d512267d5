"""Run by the image's own Python as the image's user, inside: what a kubelet and a client get of the service, and what
whoever takes it over could do. Prints a line for each; any other answer is an AssertionError.

It gets its text from standard input, since there is no place for a file. Nothing of the repository is imported.
"""

import importlib.util
import os
import shutil
import socket
import sys
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runahead.v1 import generate_pb2, generation_service_pb2_grpc

READY_S = 150.0
CALL_S = 60.0
PORT, HEALTH_PORT, METRICS_PORT = 50051, 50052, 9464


def meet_the_user() -> None:
    assert (os.getuid(), os.getgid(), os.getgroups()) == (10001, 10001, []), (os.getuid(), os.getgid(), os.getgroups())
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}, status
    assert status["NoNewPrivs"] == "1", status
    print("user 10001, no capability, no way to new privileges")


def look_at_the_tree() -> None:
    for folder in ("/", "/models", "/opt/runahead", "/home", "/var/tmp", "/etc", "/run"):
        try:
            Path(folder, "written").touch()
        except OSError as error:
            assert error.errno in (13, 30), error  # EACCES, EROFS
        else:
            raise AssertionError(f"{folder} can be written to")
    assert os.statvfs("/").f_flag & os.ST_RDONLY, "the tree is not read-only"
    for folder in ("/tmp", "/dev/shm"):
        Path(folder, "written").touch()
        Path(folder, "written").unlink()
    print("read-only but for /tmp and /dev/shm")


def look_for_tools() -> None:
    found = [name for name in ("cc", "gcc", "clang", "c++", "ld", "as", "pip", "pip3") if shutil.which(name)]
    assert not found, found
    assert importlib.util.find_spec("pip") is None
    nvidia = list(Path(sys.prefix).rglob("site-packages/nvidia*"))
    assert not nvidia, nvidia
    print("no compiler, no linker, no pip, nothing for CUDA")


def look_for_a_network() -> None:
    assert [name for _, name in socket.if_nameindex()] == ["lo"], socket.if_nameindex()
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=CALL_S)  # an address of documentation: nobody's
    except OSError as error:
        assert error.errno == 101, error  # ENETUNREACH
    else:
        raise AssertionError("there is a network")
    print("no network")


def probe() -> None:
    """As a kubelet does, by the health port. It asks again and again; a watch says it at once."""
    with grpc.insecure_channel(f"127.0.0.1:{HEALTH_PORT}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "runahead.v1.GenerationService"):
            request = health_pb2.HealthCheckRequest(service=name)
            answers = health.Watch(request, timeout=READY_S, wait_for_ready=True)
            assert any(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers)
            answers.cancel()
            assert health.Check(request, timeout=CALL_S).status == health_pb2.HealthCheckResponse.SERVING
            print(f"health of {name!r}: SERVING")


def ask() -> None:
    with grpc.insecure_channel(f"127.0.0.1:{PORT}") as channel:
        service = generation_service_pb2_grpc.GenerationServiceStub(channel)
        request = generate_pb2.GenerateRequest(
            text="def read_lines(path):\n",
            sampling=generate_pb2.SamplingOptions(temperature=0),
            stopping=generate_pb2.StoppingOptions(max_tokens=16),
        )
        responses = list(service.Generate(request, timeout=CALL_S))
    text = "".join(response.delta.text for response in responses)
    assert text.strip(), responses
    assert responses[-1].HasField("finished"), responses[-1]
    print(f"Generate answers: {text!r}")


def scrape() -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=CALL_S) as answer:
        assert b"\nrunahead_engine_up 1.0\n" in answer.read()
    print("/metrics: the engine is up")


meet_the_user()
look_at_the_tree()
look_for_tools()
look_for_a_network()
probe()
ask()
scrape()
