"""What a module may load, and what may be done with data and with the environment."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.project.repository import PACKAGES, ROOT, TOOLS, name_of, names_used, parsed, sources

ONE_READER = "runtime/models/drafters/head_files.py"  # of what torch.save wrote: draft heads published so


def modules_after(statement: str) -> set[str]:
    """Modules that a fresh interpreter holds after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_pure_modules_load_neither_torch_nor_a_loop_nor_a_logger() -> None:
    loaded = modules_after(
        "from runahead.runtime.memory import block_pool\nfrom runahead.runtime.scheduler import ledger, scheduler"
    )
    assert "runahead.runtime.scheduler.ledger" in loaded
    assert not loaded & {"torch", "asyncio", "structlog", "grpc"}


@pytest.mark.parametrize(
    "module",
    [
        "runahead.service.cli",
        "runahead.service.settings.settings",
        "runahead.service.commands.abort_command",
        "runahead.service.commands.chat_command",
        "runahead.service.commands.generate_command",
        "runahead.service.commands.stats_command",
        "runahead.service.processes.server",
    ],
)
def test_the_front_end_never_loads_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert "torch" not in loaded


def test_a_chat_loads_nothing_of_a_server_and_its_template_s_process_neither() -> None:
    chat = modules_after("import runahead.service.commands.chat_command")
    template = modules_after("import runahead.service.chat.template_process")
    assert "runahead.service.commands.chat_command" in chat and "jinja2" in template
    rooms = ("servers", "servicers", "completion", "stats", "calls", "text", "processes", "engine")
    servers = {f"runahead.service.{room}" for room in rooms} | {"runahead.runtime.engine", "runahead.runtime.kernels"}
    assert not (chat | template) & {*servers, "numpy", "torch", "tokenizers"}
    assert "jinja2" not in chat, "it is an extra"
    assert not template & {"grpc", "runahead.v1"}


def test_what_describes_a_model_loads_no_compiler() -> None:
    """Arithmetic on the device `meta` would. Each public checkpoint is described, as at every start."""
    loaded = modules_after(
        "import json, pathlib, tempfile\n"
        "from runahead.runtime.checkpoint import open_checkpoint\n"
        "from runahead.runtime.models.read_config import load_config\n"
        "from runahead.runtime.models.weights import described\n"
        "from tests.runtime.models.public_configs import PUBLIC\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    for keys in PUBLIC.values():\n"
        "        pathlib.Path(folder, 'config.json').write_text(json.dumps(keys))\n"
        "        described(load_config(open_checkpoint(pathlib.Path(folder))))\n"
    )
    assert "runahead.runtime.models.weights" in loaded
    assert not loaded & {"torch._dynamo", "sympy"}


def test_a_client_that_installs_the_package_imports_the_contract() -> None:
    loaded = modules_after("import os; os.chdir('/')\nimport runahead.v1.generation_service_pb2_grpc")
    assert {"runahead.v1", "runahead.v1.generate_pb2", "runahead.v1.generation_service_pb2_grpc"} <= loaded
    assert not loaded & {"runahead.service", "runahead.runtime", "torch"}


def test_only_the_settings_read_the_environment() -> None:
    readers = {
        name_of(path)
        for path in sources(*PACKAGES)
        if names_used(path) & {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    }
    assert readers == {"service/settings/settings.py"}


def test_nothing_can_run_code_from_data() -> None:
    unsafe = {
        "pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load", "torch.serialization",
        "multiprocessing.connection",
    }  # fmt: skip
    offenders = {name_of(path): names_used(path) & unsafe for path in sources(*PACKAGES, *TOOLS)}
    assert {path: names for path, names in offenders.items() if names} == {ONE_READER: {"torch.load"}}


def test_the_one_file_that_reads_what_torch_saved_has_it_read_tensors_alone() -> None:
    """In each place, in these words: no default of a library and no variable decides it."""
    [path] = [path for path in sources(*PACKAGES) if name_of(path) == ONE_READER]
    nodes = list(ast.walk(parsed(path)))
    named = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.func in named]
    assert len(named) == len(calls) == 1, "it is called, once, and nowhere handed on"
    given = {word.arg: ast.unparse(word.value) for word in calls[0].keywords}
    assert given == {"map_location": "'cpu'", "mmap": "True", "weights_only": "True"}
