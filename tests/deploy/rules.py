"""What a schema can't say of the manifests: that they fit the server, and each other. A rule yields a sentence for each
thing that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from runahead.service.servers.supervised import GENERATION
from runahead.service.settings.loopback import is_loopback
from runahead.service.settings.settings import NO_PORT
from tests.deploy.rendering import NAME, Manifests, Object
from tests.deploy.served_settings import SettingsRefused, front_end_settings

END_S: Final = 20  # that a service may take from its grace's end to its own: see Supervisor._drain and close
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
# What a policy may let in: clients, Prometheus, readers of the KV cache's events. Kubelet's probes need no policy.
OPEN_PORTS: Final = ("grpc", "metrics", "kv-events", "kv-replay")

Rule = Callable[[Manifests], Iterator[str]]
_GPU: Final = "nvidia.com/gpu"


def probes_ask_what_the_server_answers(manifests: Manifests) -> Iterator[str]:
    """On its health port, whose number stands in the settings, for services that it has."""
    health = front_end_settings(manifests).health_port
    for name in PROBES:
        probe = manifests.container.get(name, {})
        if "grpc" not in probe:
            yield f"{name} is no gRPC probe"
            continue
        if probe["grpc"]["port"] != health:
            yield f"{name} asks port {probe['grpc']['port']}, and health is answered on {health}"
        wanted = "" if name == "livenessProbe" else GENERATION
        if probe["grpc"].get("service", "") != wanted:
            yield f"{name} asks for {probe['grpc'].get('service', '')!r} and not for {wanted!r}"


def ports_are_the_servers(manifests: Manifests) -> Iterator[str]:
    """The container's ports are those that the settings name, on addresses that other machines reach."""
    settings = front_end_settings(manifests)
    wanted = {"grpc": settings.port, "health": settings.health_port, "metrics": settings.metrics_port}
    events = {"kv-events": settings.kv_events_port, "kv-replay": settings.kv_events_replay_port}
    wanted |= {name: port for name, port in events.items() if port != NO_PORT}
    if manifests.ports() != wanted:
        yield f"the container's ports are {manifests.ports()}, and the server's {wanted}"
    hosts = {"host": settings.host, "health_host": settings.health_host, "metrics_host": settings.metrics_host}
    for name, host in hosts.items():
        if is_loopback(host):
            yield f"{name} {host} can't be reached from outside of the pod"


def there_is_time_to_end(manifests: Manifests) -> Iterator[str]:
    """preStop, drain and end fit into the time that kubelet gives; a rollout waits longer than a start may take."""
    pod, container = manifests.pod, manifests.container
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    if not sleep:
        yield "preStop does not sleep"
    needed = sleep + front_end_settings(manifests).shutdown_grace_s + END_S
    if pod["terminationGracePeriodSeconds"] <= needed:
        yield f"terminationGracePeriodSeconds {pod['terminationGracePeriodSeconds']} is not above {needed:g}"
    startup = container["startupProbe"]
    start_s = startup["periodSeconds"] * startup["failureThreshold"]
    if manifests.deployment["spec"]["progressDeadlineSeconds"] <= start_s:
        yield f"progressDeadlineSeconds is not above the {start_s} s that a start may take"


def resources_are_given_for_good(manifests: Manifests) -> Iterator[str]:
    """GPUs and memory can't be taken back: what is asked for is the limit."""
    resources = manifests.container["resources"]
    requests, limits = resources["requests"], resources["limits"]
    if missing := {"cpu", "memory", "ephemeral-storage"} - requests.keys():
        yield f"no requests for {sorted(missing)}"
    for name in ("memory", _GPU):
        if requests.get(name) != limits.get(name):
            yield f"{name}: {requests.get(name)} is asked for and {limits.get(name)} is the limit"
    ranks = manifests.settings.get("RUNAHEAD__TENSOR_PARALLEL", "1")
    wanted = ranks if manifests.settings.get("RUNAHEAD__DEVICE") == "cuda" else None
    if limits.get(_GPU) != wanted:
        yield f"RUNAHEAD__DEVICE, RUNAHEAD__TENSOR_PARALLEL and the limit on {_GPU} contradict each other"


def settings_are_known_and_fit(manifests: Manifests) -> Iterator[str]:
    """The command line takes the arguments and the variables, and starts with them."""
    try:
        front_end_settings(manifests)
    except SettingsRefused as refusal:
        yield str(refusal)


def files_are_mounted(manifests: Manifests) -> Iterator[str]:
    """What a setting names lies in a volume that has it, in a folder that follows its changes."""
    mounts = {PurePosixPath(mount["mountPath"]): mount for mount in manifests.container["volumeMounts"]}
    for variable, value in manifests.settings.items():
        if not value.startswith("/"):
            continue
        path = PurePosixPath(value)
        mount = next((mount for folder, mount in mounts.items() if path.is_relative_to(folder)), None)
        if mount is None:
            yield f"{variable}: {value} is in no volume"
            continue
        if "subPath" in mount:
            yield f"{variable}: {value} is a subPath, which does not follow changes"
        volume = manifests.volume(mount["name"])
        items = {item["path"] for item in volume.get("secret", {}).get("items", ())}
        if "secret" in volume and path.relative_to(mount["mountPath"]).as_posix() not in items:
            yield f"{variable}: {value} is no item of the Secret {volume['secret']['secretName']}"
        is_cache = variable.endswith("_CACHE")
        if is_cache == bool(mount.get("readOnly")):
            yield f"{variable}: {value} must {'not ' if is_cache else ''}be read-only"
    for folder, medium in (("/tmp", None), ("/dev/shm", "Memory")):
        mount = mounts.get(PurePosixPath(folder))
        if mount is None or manifests.volume(mount["name"]).get("emptyDir", {}).get("medium", None) != medium:
            yield f"{folder} is no emptyDir of its own"


def secrets_are_named_and_nowhere(manifests: Manifests) -> Iterator[str]:
    """A token is required, by the name of its Secret; none is part of what is rendered."""
    if not front_end_settings(manifests).callers:
        yield "nobody is asked for a token"
    if names := [each["metadata"]["name"] for each in manifests.of("Secret")]:
        yield f"Secrets are rendered: {names}"
    for volume in manifests.pod["volumes"]:
        if volume.get("secret", {}).get("optional"):
            yield f"the pod starts without the Secret {volume['secret']['secretName']}"
    for where, text in _texts(manifests.objects, ""):
        if re.search(r"-----BEGIN|\b(token|certificate) [A-Za-z0-9._~+/-]{16,}", text):
            yield f"{where} looks like a credential"


def selectors_meet(manifests: Manifests) -> Iterator[str]:
    """Whatever selects pods selects the Deployment's, and whatever names an object names one that is there."""
    labels = manifests.template["metadata"]["labels"]
    selectors: list[tuple[str, Mapping[str, str]]] = [
        ("Deployment", manifests.deployment["spec"]["selector"]["matchLabels"]),
        *((f"Service {_name(each)}", each["spec"]["selector"]) for each in manifests.of("Service")),
        *((f"{each['kind']} {_name(each)}", each["spec"]["selector"]["matchLabels"]) for each in _budgets(manifests)),
        *((f"policy {_name(each)}", each["spec"]["podSelector"]["matchLabels"]) for each in _policies(manifests)),
        *(("spread", each["labelSelector"]["matchLabels"]) for each in manifests.pod["topologySpreadConstraints"]),
    ]
    for who, selector in selectors:
        if not selector or not selector.items() <= labels.items():
            yield f"{who} selects {selector}, and the pods have {labels}"
    for each in (*manifests.of("HorizontalPodAutoscaler"), *manifests.of("ScaledObject")):
        if each["spec"]["scaleTargetRef"]["name"] != _name(manifests.deployment):
            yield f"{each['kind']} {_name(each)} scales something else"
    for each in manifests.of("ServiceMonitor"):
        wanted = each["spec"]["selector"]["matchLabels"]
        found = [service for service in manifests.of("Service") if wanted.items() <= _labels(service).items()]
        if len(found) != 1:
            yield f"the ServiceMonitor selects {len(found)} Services"
        elif {end["port"] for end in each["spec"]["endpoints"]} - {port["name"] for port in found[0]["spec"]["ports"]}:
            yield "the ServiceMonitor names a port that its Service lacks"
    account = manifests.pod["serviceAccountName"]
    if account not in map(_name, manifests.of("ServiceAccount")):
        yield f"there is no ServiceAccount {account}"


def ports_meet(manifests: Manifests) -> Iterator[str]:
    """From a route over a Service to the container."""
    ports, services = manifests.ports(), {_name(each): each for each in manifests.of("Service")}
    for service in services.values():
        for port in service["spec"]["ports"]:
            if ports.get(port["targetPort"], None) != port["port"]:
                yield f"Service {_name(service)} sends {port['port']} to {port['targetPort']}, and the pod has {ports}"
    for policy in _policies(manifests):
        for rule in policy["spec"].get("ingress", ()):
            if unknown := {port["port"] for port in rule["ports"]} - {*OPEN_PORTS}:
                yield f"policy {_name(policy)} opens {unknown}"
    pools = {_name(each): each["spec"]["targetPorts"] for each in manifests.of("InferencePool")}
    for pool in pools.values():
        if [port["number"] for port in pool] != [ports["grpc"]]:
            yield f"the InferencePool sends to {pool}"
    for route in manifests.of("GRPCRoute"):
        for to in (to for rule in route["spec"]["rules"] for to in rule["backendRefs"]):
            if to.get("kind", "Service") == "InferencePool":
                offered = [ports["grpc"]] if to["name"] in pools else []
            else:
                offered = [port["port"] for port in services.get(to["name"], {"spec": {"ports": []}})["spec"]["ports"]]
            if to["port"] not in offered:
                yield f"route {_name(route)} sends to {to['name']} port {to['port']}, which has {offered}"


def nothing_passes_unless_named(manifests: Manifests) -> Iterator[str]:
    """A policy denies all, in both directions, and no policy opens a way out."""
    denials = [
        each
        for each in _policies(manifests)
        if {*each["spec"]["policyTypes"]} == {"Ingress", "Egress"} and not {"ingress", "egress"} & each["spec"].keys()
    ]
    if not denials:
        yield "no policy denies everything"
    for policy in _policies(manifests):
        if policy["spec"].get("egress"):
            yield f"policy {_name(policy)} lets the pods call out"
        for rule in policy["spec"].get("ingress", ()):
            if not rule.get("from") or not rule.get("ports"):
                yield f"policy {_name(policy)} has a rule for everybody or for every port"


def pods_are_restricted(manifests: Manifests) -> Iterator[str]:
    """The Pod Security Standard `restricted`, a root that can't be written, no token and no variables of Services."""
    pod, container = manifests.pod, manifests.container
    own = pod["securityContext"] | container["securityContext"]
    wanted: dict[str, Any] = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for name, value in wanted.items():
        if own.get(name) != value:
            yield f"{name} is {own.get(name)!r} and not {value!r}"
    for name in ("enableServiceLinks", "automountServiceAccountToken"):
        if pod.get(name) is not False:
            yield f"{name} is not false"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is set"
    for account in manifests.of("ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"the ServiceAccount {_name(account)} mounts its token"


def all_is_in_one_namespace(manifests: Manifests) -> Iterator[str]:
    space = manifests.deployment["metadata"]["namespace"]
    for each in manifests.objects:
        if each["metadata"].get("namespace") != space:
            yield f"{each['kind']} {_name(each)} is not in {space}"


def deleting_leaves_what_others_made(manifests: Manifests) -> Iterator[str]:
    """`kubectl delete -k` deletes what is rendered: never tokens, a model, or the namespace that holds them."""
    for each in manifests.objects:
        if each["kind"] in ("Namespace", "PersistentVolumeClaim", "Secret"):
            yield f"{each['kind']} {_name(each)} would be deleted with the service"


def one_thing_says_how_many_pods(manifests: Manifests) -> Iterator[str]:
    """The Deployment or an autoscaler, and a rollout that can go on."""
    scalers = [*manifests.of("HorizontalPodAutoscaler"), *manifests.of("ScaledObject")]
    if len(scalers) + ("replicas" in manifests.deployment["spec"]) != 1:
        yield f"{len(scalers)} autoscalers, and replicas {manifests.deployment['spec'].get('replicas')}"
    rolling = manifests.deployment["spec"]["strategy"]["rollingUpdate"]
    if _GPU in manifests.container["resources"]["limits"]:
        if rolling != {"maxSurge": 0, "maxUnavailable": 1}:
            yield "a new pod would wait for a GPU that an old one has"
    elif rolling != {"maxSurge": 1, "maxUnavailable": 0}:
        yield "a rollout takes a pod away before there is another"


def settings_roll_out(manifests: Manifests) -> Iterator[str]:
    """The ConfigMap has a hash of its contents in its name, so that another setting makes another pod."""
    names = [source["configMapRef"]["name"] for source in manifests.container["envFrom"]]
    if not all(re.fullmatch(rf"{NAME}-settings-[a-z0-9]{{10}}", name) for name in names):
        yield f"{names} have no hash"


def everything_has_the_label(manifests: Manifests) -> Iterator[str]:
    """What selects by it, `kubectl apply --prune -l` for one, leaves out an object that lacks it."""
    for each in manifests.objects:
        if _labels(each).get("app.kubernetes.io/name") != NAME:
            yield f"{each['kind']} {_name(each)} has the labels {_labels(each)}"


RULES: Final[tuple[Rule, ...]] = (
    settings_are_known_and_fit,
    probes_ask_what_the_server_answers,
    ports_are_the_servers,
    there_is_time_to_end,
    resources_are_given_for_good,
    files_are_mounted,
    secrets_are_named_and_nowhere,
    selectors_meet,
    ports_meet,
    nothing_passes_unless_named,
    pods_are_restricted,
    all_is_in_one_namespace,
    deleting_leaves_what_others_made,
    everything_has_the_label,
    one_thing_says_how_many_pods,
    settings_roll_out,
)


def _name(each: Object) -> str:
    return str(each["metadata"]["name"])


def _labels(each: Object) -> dict[str, str]:
    labels: dict[str, str] = each["metadata"].get("labels", {})
    return labels


def _budgets(manifests: Manifests) -> Iterator[Object]:
    yield from manifests.of("PodDisruptionBudget")
    yield from manifests.of("InferencePool")


def _policies(manifests: Manifests) -> Iterator[Object]:
    return manifests.of("NetworkPolicy")


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """All strings in objects, and where they are."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(each, f"{where}.{key}")
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _texts(each, f"{where}[{place}]")
