"""The real service where the system has no more descriptors for it: a sentence or a status, and nothing else."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from benchmarks.local_service import BESIDE, started_service
from runahead.service.processes.children import FRONT_END_MODULE
from runahead.v1 import GenerateRequest, GenerationServiceStub, StoppingOptions, Structure
from tests.service.rpc_errors import code, detail, failure
from tests.service.service_processes import running

END_S = 60.0
FEW = 64  # descriptors of each process
MORE = 100  # connections


def held(process: int) -> int:
    """Descriptors."""
    return sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())


@pytest.mark.parametrize("descriptors", [12, 18])
def test_a_service_without_descriptors_to_start_with_says_so(descriptors: int) -> None:
    script = f"ulimit -n {descriptors}; exec {sys.executable} -m runahead serve --port 0 {' '.join(BESIDE)}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("runahead serve: the system refuses what the service needs: ")
    assert "Too many open files" in done.stderr and "Traceback" not in done.stderr


def test_a_structure_that_there_is_no_process_for_is_refused_and_taken_when_there_is_one() -> None:
    request = GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=4), structure=Structure(regex="ab"))
    with started_service(["--threads", "1", "--num-blocks", "600"]) as service, contextlib.ExitStack() as stack:
        (front_end,) = running(service, FRONT_END_MODULE)
        resource.prlimit(front_end, resource.RLIMIT_NOFILE, (FEW, FEW))
        stub = GenerationServiceStub(stack.enter_context(grpc.insecure_channel(service.url)))
        plain = GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=1))
        assert list(stub.Generate(plain, timeout=END_S))[-1].WhichOneof("event") == "finished"
        host, _, port = service.url.rpartition(":")
        with contextlib.ExitStack() as idle:
            for _ in range(MORE):
                idle.enter_context(socket.create_connection((host, int(port)), END_S))
            while held(front_end) < FEW:
                pass
            error = failure(lambda: list(stub.Generate(request, timeout=END_S)))
            assert code(error) == grpc.StatusCode.UNAVAILABLE
            assert detail(error, error_details_pb2.ErrorInfo).reason == "STRUCTURE_LOST"
            assert list(stub.Generate(plain, timeout=END_S))[-1].WhichOneof("event") == "finished"
        while held(front_end) > FEW // 2:
            pass
        assert list(stub.Generate(request, timeout=END_S))[-1].WhichOneof("event") == "finished"
