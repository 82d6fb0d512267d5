"""A stand-in for the API server of Kubernetes, on loopback: what kubectl needs to apply, read and delete objects.

It keeps objects in memory, merges patches, and sets a Deployment's default of one replica. It validates nothing, starts
no pod and runs no controller. Tests see what kubectl itself computes and sends, which needs no cluster.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.deploy.rendering import Object

# By group and version: kinds, their plurals, and whether they are in a namespace.
_KINDS: Final[Mapping[str, Mapping[str, tuple[str, bool]]]] = {
    "v1": {
        "ConfigMap": ("configmaps", True),
        "Endpoints": ("endpoints", True),
        "Namespace": ("namespaces", False),
        "PersistentVolume": ("persistentvolumes", False),
        "PersistentVolumeClaim": ("persistentvolumeclaims", True),
        "Pod": ("pods", True),
        "ReplicationController": ("replicationcontrollers", True),
        "Secret": ("secrets", True),
        "Service": ("services", True),
        "ServiceAccount": ("serviceaccounts", True),
    },
    "apps/v1": {
        "DaemonSet": ("daemonsets", True),
        "Deployment": ("deployments", True),
        "ReplicaSet": ("replicasets", True),
        "StatefulSet": ("statefulsets", True),
    },
    "autoscaling/v2": {"HorizontalPodAutoscaler": ("horizontalpodautoscalers", True)},
    "batch/v1": {"CronJob": ("cronjobs", True), "Job": ("jobs", True)},
    "networking.k8s.io/v1": {"Ingress": ("ingresses", True), "NetworkPolicy": ("networkpolicies", True)},
    "policy/v1": {"PodDisruptionBudget": ("poddisruptionbudgets", True)},
}
_VERBS: Final = ["create", "delete", "get", "list", "patch", "update"]


class ApiServer:
    """objects: what is there, by kind, namespace ("" for none) and name. patches: what kubectl sent, in order."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.patches: list[tuple[str, str, Any]] = []  # kind, name, patch
        self._lock = Lock()
        self._version = 0

    def named(self, kind: str, namespace: str = "runahead") -> set[str]:
        """The names of a kind's objects."""
        return {name for of_kind, space, name in self.objects if (of_kind, space) == (kind, namespace)}

    def one(self, kind: str, name: str = "runahead", namespace: str = "runahead") -> Object:
        """Raises KeyError."""
        return self.objects[kind, namespace, name]

    def answer(self, verb: str, path: str, body: Any) -> tuple[int, Any]:
        """The status and the JSON of one call."""
        with self._lock:
            address = urlsplit(path)
            parts = address.path.strip("/").split("/")
            if (found := _discovered(parts)) is not None:
                return 200, found
            group = "v1" if parts[0] == "api" else "/".join(parts[1:3])
            rest = parts[2:] if parts[0] == "api" else parts[3:]
            space = ""
            if rest[:1] == ["namespaces"] and len(rest) > 2:
                space, rest = rest[1], rest[2:]
            kinds = {plural: kind for kind, (plural, _) in _KINDS.get(group, {}).items()}
            if not rest or rest[0] not in kinds:
                return _failure(404, "NotFound", f"no {address.path} here")
            kind, query = kinds[rest[0]], parse_qs(address.query)
            if len(rest) == 1:
                return self._create(kind, space, body) if verb == "POST" else self._list(group, kind, space, query)
            if rest[2:] == ["scale"]:
                return 200, self._scale(self.objects[kind, space, rest[1]], body)
            return self._on_one(verb, kind, space, rest[1], body)

    def _create(self, kind: str, space: str, made: Object) -> tuple[int, Any]:
        name = made["metadata"]["name"]
        if (kind, space, name) in self.objects:
            return _failure(409, "AlreadyExists", f'{kind} "{name}" already exists')
        return 201, self._keep(kind, space, made)

    def _list(self, group: str, kind: str, space: str, query: Mapping[str, list[str]]) -> tuple[int, Any]:
        wanted = dict(each.split("=", 1) for each in query.get("labelSelector", [""])[0].split(",") if "=" in each)
        names = [each.partition("metadata.name=")[2] for each in query.get("fieldSelector", ())]
        items = [
            each
            for (of_kind, where, name), each in self.objects.items()
            if of_kind == kind
            and space in ("", where)
            and wanted.items() <= each["metadata"].get("labels", {}).items()
            and (not names or name in names)
        ]
        version = {"resourceVersion": str(self._version)}
        return 200, {"apiVersion": group, "kind": f"{kind}List", "metadata": version, "items": items}

    def _on_one(self, verb: str, kind: str, space: str, name: str, body: Any) -> tuple[int, Any]:
        there = self.objects.get((kind, space, name))
        if there is None and verb == "PATCH" and body.get("kind") == kind:  # server-side apply
            return self._create(kind, space, body)
        if there is None:
            return _failure(404, "NotFound", f'{kind} "{name}" not found')
        if verb == "DELETE":
            del self.objects[kind, space, name]
            return 200, {"apiVersion": "v1", "kind": "Status", "status": "Success"}
        if verb == "PATCH":
            self.patches.append((kind, name, body))
            return 200, self._keep(kind, space, _merged(there, body))
        return 200, self._keep(kind, space, body) if verb == "PUT" else there

    def _scale(self, there: Object, patch: Any) -> Object:
        """The number of replicas as `kubectl scale` reads and sets it."""
        there["spec"]["replicas"] = (patch or there)["spec"]["replicas"]
        metadata = {name: there["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
        spec = {"replicas": there["spec"]["replicas"]}
        return {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata, "spec": spec}

    def _keep(self, kind: str, space: str, made: Object) -> Object:
        self._version += 1
        made["metadata"] |= {"resourceVersion": str(self._version), "uid": f"{kind}-{made['metadata']['name']}"}
        if space:
            made["metadata"]["namespace"] = space
        if kind == "Deployment":
            made["spec"].setdefault("replicas", 1)
        self.objects[kind, space, made["metadata"]["name"]] = made
        return made


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[ApiServer, Path]]:
    """A server that runs, and a kubeconfig for it, written into `folder`."""
    server = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = _read(self.rfile.read(length))
            status, answer = server.answer(self.command, self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # names in http.server

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{http.server_address[1]}"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    try:
        yield server, config
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _read(body: bytes) -> Any:
    """An object of JSON, or a Secret as `kubectl create secret` sends it: protobuf in an envelope of Kubernetes."""
    if not body.startswith(b"k8s\0"):
        return json.loads(body) if body else None
    secret = dict(_fields(body[4:]))[2]
    metadata = dict(_fields(dict(_fields(secret))[1]))
    items = [dict(_fields(value)) for number, value in _fields(secret) if number == 2]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": metadata[1].decode()},
        "data": {item[1].decode(): base64.b64encode(item[2]).decode() for item in items},
    }


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protobuf message, by number, those that have a length; others are passed over."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _varint(message, at)  # of wire type 0; the length of wire type 2
        if key & 7 == 2:
            yield key >> 3, message[at : at + value]
            at += value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a place, and the place behind it."""
    value = shift = 0
    while message[at] > 127:
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1


def _discovered(parts: list[str]) -> Any:
    """What the server says of itself; None for a path of objects."""
    match parts:
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            versions = [{"groupVersion": each, "version": each.split("/")[1]} for each in _KINDS if "/" in each]
            groups = [
                {"name": each["groupVersion"].split("/")[0], "versions": [each], "preferredVersion": each}
                for each in versions
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        case ["openapi", "v3"]:
            return {"paths": {_path(each): {"serverRelativeURL": f"/openapi/v3/{_path(each)}"} for each in _KINDS}}
        case ["openapi", "v3", *path]:
            return _validation("/".join(path[1:]))
        case ["api", "v1"] | ["apis", _, _]:
            group = "/".join(parts[1:])
            resources = [
                {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": _VERBS}
                for kind, (plural, namespaced) in _KINDS.get(group, {}).items()
            ]
            if group == "apps/v1":
                scale = {"name": "deployments/scale", "namespaced": True, "verbs": _VERBS}
                resources.append(scale | {"group": "autoscaling", "version": "v1", "kind": "Scale"})
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}
    return None


def _path(group: str) -> str:
    return f"apis/{group}" if "/" in group else f"api/{group}"


def _validation(group: str) -> Any:
    """Says that the server validates fields, so that kubectl asks for no schema."""
    of_group, _, version = group.rpartition("/")
    paths = {
        f"/{kind}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": of_group, "version": version, "kind": kind},
            }
        }
        for kind in _KINDS[group]
    }
    return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": "1"}, "paths": paths}


def _merged(there: Any, patch: Any) -> Any:
    """A merge patch, in which a list of named objects merges by their names, as a strategic one does."""
    if isinstance(there, list) and isinstance(patch, list) and all("name" in each for each in (*there, *patch)):
        made = {each["name"]: each for each in there}
        for each in patch:
            made[each["name"]] = _merged(made.get(each["name"], {}), each)
        return list(made.values())
    if not (isinstance(there, dict) and isinstance(patch, dict)):
        return patch
    made = dict(there)
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        elif not key.startswith("$"):
            made[key] = _merged(made.get(key, {} if isinstance(value, dict) else None), value)
    return made


def _failure(code: int, reason: str, message: str) -> tuple[int, Any]:
    return code, {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }
