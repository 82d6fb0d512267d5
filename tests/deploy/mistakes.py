"""Manifests with a mistake in them, for each rule some that it must see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tests.deploy.rendering import Manifests

Break = Callable[[Manifests], object]


def set_setting(variable: str, value: str) -> Break:
    def change(manifests: Manifests) -> None:
        name = manifests.container["envFrom"][0]["configMapRef"]["name"]
        manifests.one("ConfigMap", name)["data"][variable] = value

    return change


def labels_of(manifests: Manifests) -> dict[str, str]:
    labels: dict[str, str] = manifests.template["metadata"]["labels"]
    return labels


def add(kind: str, **rest: object) -> Break:
    return lambda manifests: manifests.objects.append({"kind": kind, "metadata": {"name": "more"}, **rest})


def open_way_out(manifests: Manifests) -> None:
    manifests.one("NetworkPolicy", "runahead-clients")["spec"]["egress"] = [{}]


def ask_nobody(manifests: Manifests) -> None:
    for variable, value in (("CALLERS", ""), ("PLAINTEXT_TOKENS", "false"), ("INSECURE", "true")):
        set_setting(f"RUNAHEAD__{variable}", value)(manifests)


# By a rule's name and what is wrong: a composition, what is done to it, a rule that sees it, and words of what it says.
MISTAKES: Final[Mapping[str, tuple[str, Break, str]]] = {
    "settings_are_known_and_fit: a variable that no setting has": (
        "base",
        set_setting("RUNAHEAD__RUN_AHEAT", "2"),
        "RUNAHEAD__RUN_AHEAT is not a setting",
    ),
    "settings_are_known_and_fit: a value out of bounds": (
        "base",
        set_setting("RUNAHEAD__RUN_AHEAD", "9"),
        "RUNAHEAD__RUN_AHEAD",
    ),
    "settings_are_known_and_fit: settings that contradict each other": (
        "tls",
        set_setting("RUNAHEAD__PLAINTEXT_TOKENS", "true"),
        "has no effect",
    ),
    "settings_are_known_and_fit: a flag that the command has not": (
        "base",
        lambda manifests: manifests.container["command"].append("--run-aheat=2"),
        "--run-aheat=2 is not a flag",
    ),
    "settings_are_known_and_fit: a variable of nobody": (
        "base",
        lambda manifests: manifests.container.update(env=[{"name": "RUNAHEAD_PORT", "value": "1"}]),
        "RUNAHEAD_PORT is not a setting's variable",
    ),
    "probes_ask_what_the_server_answers: another port": (
        "base",
        lambda manifests: manifests.container["readinessProbe"]["grpc"].update(port=50051),
        "asks port 50051, and health is answered on 50052",
    ),
    "probes_ask_what_the_server_answers: a service that is none": (
        "base",
        lambda manifests: manifests.container["startupProbe"]["grpc"].update(service="runahead.Generation"),
        "startupProbe asks for 'runahead.Generation'",
    ),
    "probes_ask_what_the_server_answers: readiness as life": (
        "base",
        lambda manifests: manifests.container["livenessProbe"]["grpc"].update(service="runahead.v1.GenerationService"),
        "livenessProbe asks for",
    ),
    "probes_ask_what_the_server_answers: no probe": (
        "base",
        lambda manifests: manifests.container.pop("livenessProbe"),
        "livenessProbe is no gRPC probe",
    ),
    "ports_are_the_servers: the server listens elsewhere": (
        "base",
        set_setting("RUNAHEAD__METRICS_PORT", "9090"),
        "'metrics': 9090",
    ),
    "ports_are_the_servers: health on loopback": (
        "base",
        set_setting("RUNAHEAD__HEALTH_HOST", "127.0.0.1"),
        "health_host 127.0.0.1 can't be reached",
    ),
    "there_is_time_to_end: a longer drain": (
        "base",
        set_setting("RUNAHEAD__SHUTDOWN_GRACE_S", "90"),
        "120 is not above 120",
    ),
    "there_is_time_to_end: no sleep": (
        "base",
        lambda manifests: manifests.container.pop("lifecycle"),
        "preStop does not sleep",
    ),
    "there_is_time_to_end: a rollout that gives up early": (
        "gpu",
        lambda manifests: manifests.deployment["spec"].update(progressDeadlineSeconds=600),
        "progressDeadlineSeconds is not above",
    ),
    "resources_are_given_for_good: GPUs asked for and not limited": (
        "gpu",
        lambda manifests: manifests.container["resources"]["requests"].update({"nvidia.com/gpu": "2"}),
        "nvidia.com/gpu: 2 is asked for and 1 is the limit",
    ),
    "resources_are_given_for_good: memory that can be taken back": (
        "base",
        lambda manifests: manifests.container["resources"]["requests"].update(memory="1Gi"),
        "memory: 1Gi is asked for",
    ),
    "resources_are_given_for_good: a GPU's settings without one": (
        "base",
        set_setting("RUNAHEAD__DEVICE", "cuda"),
        "contradict each other",
    ),
    "resources_are_given_for_good: two ranks on one GPU": (
        "gpu",
        set_setting("RUNAHEAD__TENSOR_PARALLEL", "2"),
        "contradict each other",
    ),
    "files_are_mounted: callers that are in no volume": (
        "base",
        set_setting("RUNAHEAD__CALLERS", "/etc/callers"),
        "/etc/callers is in no volume",
    ),
    "files_are_mounted: a key that the Secret lacks": (
        "tls",
        set_setting("RUNAHEAD__TLS_KEY", "/etc/runahead/tls/server.key"),
        "is no item of the Secret runahead-tls",
    ),
    "files_are_mounted: a file that never changes": (
        "base",
        lambda manifests: manifests.container["volumeMounts"][0].update(subPath="callers"),
        "which does not follow changes",
    ),
    "files_are_mounted: a cache that can't be written": (
        "gpu",
        lambda manifests: next(
            mount for mount in manifests.container["volumeMounts"] if mount["name"] == "kernels"
        ).update(readOnly=True),
        "must not be read-only",
    ),
    "files_are_mounted: no place for temporary files": (
        "base",
        lambda manifests: manifests.container["volumeMounts"].pop(1),
        "/tmp is no emptyDir",
    ),
    "files_are_mounted: shared memory on a disk": (
        "base",
        lambda manifests: manifests.volume("shm")["emptyDir"].pop("medium"),
        "/dev/shm is no emptyDir",
    ),
    "secrets_are_named_and_nowhere: a Secret in the repository": (
        "base",
        add("Secret", stringData={"callers": "a generate token 0"}),
        "Secrets are rendered",
    ),
    "secrets_are_named_and_nowhere: a token among the settings": (
        "base",
        set_setting("RUNAHEAD__SERVED_NAME", "a generate token 0pvFqiMtzE7WmAKZkWpHq2LmyYVx3dyd"),
        "looks like a credential",
    ),
    "secrets_are_named_and_nowhere: a pod that starts without": (
        "base",
        lambda manifests: manifests.volume("callers")["secret"].update(optional=True),
        "starts without the Secret runahead-callers",
    ),
    "secrets_are_named_and_nowhere: nobody is asked": (
        "base",
        ask_nobody,
        "nobody is asked for a token",
    ),
    "selectors_meet: pods under another label": (
        "hpa",
        lambda manifests: labels_of(manifests).update({"app.kubernetes.io/name": "walkahead"}),
        "Service runahead selects",
    ),
    "selectors_meet: an autoscaler of something else": (
        "hpa",
        lambda manifests: manifests.one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"].update(name="x"),
        "HorizontalPodAutoscaler runahead scales something else",
    ),
    "selectors_meet: a monitor of two Services": (
        "monitoring",
        lambda manifests: manifests.one("ServiceMonitor")["spec"]["selector"]["matchLabels"].pop(
            "app.kubernetes.io/component"
        ),
        "selects 3 Services",
    ),
    "selectors_meet: a monitor of a port that is not there": (
        "monitoring",
        lambda manifests: manifests.one("ServiceMonitor")["spec"]["endpoints"][0].update(port="http"),
        "a port that its Service lacks",
    ),
    "selectors_meet: an account that is not there": (
        "base",
        lambda manifests: manifests.pod.update(serviceAccountName="default"),
        "no ServiceAccount default",
    ),
    "ports_meet: a Service of another port": (
        "base",
        lambda manifests: manifests.one("Service")["spec"]["ports"][0].update(targetPort="http"),
        "Service runahead sends 50051 to http",
    ),
    "ports_meet: a route to a port that the Service has not": (
        "grpc-route",
        lambda manifests: manifests.one("GRPCRoute")["spec"]["rules"][0]["backendRefs"][0].update(port=80),
        "sends to runahead port 80",
    ),
    "ports_meet: a pool of another port": (
        "inference-pool",
        lambda manifests: manifests.one("InferencePool")["spec"]["targetPorts"][0].update(number=8000),
        "the InferencePool sends to",
    ),
    "ports_meet: a policy that opens the health port": (
        "base",
        lambda manifests: manifests.one("NetworkPolicy", "runahead-clients")["spec"]["ingress"][0]["ports"][0].update(
            port="health"
        ),
        "opens {'health'}",
    ),
    "nothing_passes_unless_named: no denial": (
        "base",
        lambda manifests: manifests.objects.remove(manifests.one("NetworkPolicy", "runahead-default-deny")),
        "no policy denies everything",
    ),
    "nothing_passes_unless_named: a way out": ("base", open_way_out, "lets the pods call out"),
    "nothing_passes_unless_named: everybody": (
        "base",
        lambda manifests: manifests.one("NetworkPolicy", "runahead-clients")["spec"]["ingress"][0].pop("from"),
        "a rule for everybody",
    ),
    "pods_are_restricted: a root that can be written": (
        "base",
        lambda manifests: manifests.container["securityContext"].update(readOnlyRootFilesystem=False),
        "readOnlyRootFilesystem is False",
    ),
    "pods_are_restricted: somebody else's variables": (
        "base",
        lambda manifests: manifests.pod.pop("enableServiceLinks"),
        "enableServiceLinks is not false",
    ),
    "pods_are_restricted: the node's network": (
        "base",
        lambda manifests: manifests.pod.update(hostNetwork=True),
        "hostNetwork is set",
    ),
    "pods_are_restricted: a token of the cluster": (
        "base",
        lambda manifests: manifests.one("ServiceAccount").pop("automountServiceAccountToken"),
        "mounts its token",
    ),
    "all_is_in_one_namespace: one that is elsewhere": (
        "tls-elsewhere",
        lambda manifests: manifests.one("GRPCRoute")["metadata"].update(namespace="runahead"),
        "GRPCRoute runahead is not in elsewhere",
    ),
    "deleting_leaves_what_others_made: a namespace": (
        "base",
        add("Namespace"),
        "Namespace more would be deleted",
    ),
    "deleting_leaves_what_others_made: a claim": (
        "gpu",
        add("PersistentVolumeClaim"),
        "PersistentVolumeClaim more would be deleted",
    ),
    "everything_has_the_label: settings without it": (
        "base",
        lambda manifests: next(manifests.of("ConfigMap"))["metadata"].pop("labels"),
        "ConfigMap runahead-settings",
    ),
    "one_thing_says_how_many_pods: two": (
        "hpa",
        lambda manifests: manifests.deployment["spec"].update(replicas=2),
        "1 autoscalers, and replicas 2",
    ),
    "one_thing_says_how_many_pods: a rollout that needs a second GPU": (
        "gpu",
        lambda manifests: manifests.deployment["spec"]["strategy"]["rollingUpdate"].update(maxSurge=1),
        "wait for a GPU",
    ),
    "one_thing_says_how_many_pods: a rollout with a gap": (
        "base",
        lambda manifests: manifests.deployment["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=2),
        "before there is another",
    ),
    "settings_roll_out: a name that stays": (
        "base",
        lambda manifests: (
            [
                each["metadata"].update(name="runahead-settings")
                for each in manifests.of("ConfigMap")
                if each["metadata"]["name"].startswith("runahead-settings")
            ]
            and manifests.container["envFrom"][0]["configMapRef"].update(name="runahead-settings")
        ),
        "have no hash",
    ),
}
