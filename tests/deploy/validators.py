"""Programs that judge manifests, each in an environment that `make manifests` makes. All return what is wrong, in
sentences or lines; nothing is an empty list."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.rendering import K8S, Manifests, Object

SCHEMAS: Final = Path(__file__).with_name("schemas")
ALERT_TESTS: Final = Path(__file__).with_name("alert_tests.yaml")
ACCEPTED: Final = K8S / "checkov.yaml"
_TIMEOUT_S: Final = 300.0
_OF_KUBERNETES: Final = ("networking.k8s.io",)  # groups that have a dot in their name and are no custom resources'


@dataclass(frozen=True, slots=True)
class Validators:
    """environment: where the programs are. folder: for files that they read."""

    environment: Path
    folder: Path

    def yamllint(self, *paths: Path) -> list[str]:
        done = self._run("yamllint", "--strict", "-f", "parsable", "-c", K8S / "yamllint.yaml", *paths)
        return done.stdout.splitlines()

    def kubernetes(self, rendered: Mapping[str, Manifests]) -> list[str]:
        """Against the newest schemas that kubernetes-validate brings; custom resources are left out. rendered: by a
        name that is a file's."""
        files, objects = [], 0
        for name, manifests in rendered.items():
            builtin = [each for each in manifests.objects if crd_of(each) is None]
            files.append(self.folder / f"{name}.yaml")
            files[-1].write_text(yaml.safe_dump_all(builtin), encoding="utf-8")
            objects += len(builtin)
        done = self._run("kubernetes-validate", "--strict", *files)
        lines = (done.stdout + done.stderr).splitlines()
        passed = [line for line in lines if line.startswith("INFO ") and " passed " in line]
        wrong = [line for line in lines if line not in passed]
        if not wrong and (done.returncode or len(passed) != objects):
            wrong = [f"of {objects} objects {len(passed)} passed, with status {done.returncode}"]
        return wrong

    def custom(self, rendered: Mapping[str, Manifests]) -> list[str]:
        """Against the schemas that their projects publish, without fields that those do not have."""
        schemas: dict[str, dict[str, Any]] = {}
        files: dict[str, list[Path]] = {}
        for name, manifests in rendered.items():
            for place, each in enumerate(manifests.objects):
                if (schema := crd_of(each)) is None:
                    continue
                schemas[each["kind"]] = schema
                file = self.folder / f"{name}-{each['kind']}-{place}.json"
                file.write_text(json.dumps(each))
                files.setdefault(each["kind"], []).append(file)
        wrong = []
        for kind, schema in schemas.items():
            of_kind = self.folder / f"{kind}.schema.json"
            of_kind.write_text(json.dumps(schema))
            done = self._run("check-jsonschema", "--regex-variant", "python", "--schemafile", of_kind, *files[kind])
            if done.returncode:
                wrong.append(done.stdout + done.stderr)
        return wrong

    def checkov(self, texts: Mapping[str, str]) -> dict[str, set[str]]:
        """The ids of what it finds in rendered manifests, by their names."""
        files: list[str | Path] = []
        for name, text in texts.items():
            self.folder.joinpath(f"{name}.yaml").write_text(text, encoding="utf-8")
            files += ["-f", f"{name}.yaml"]
        flags = ["--framework", "kubernetes", "--skip-download", "--compact", "--quiet", "-o", "json"]
        report = json.loads(self._run("checkov", *files, *flags).stdout)
        summary = report.get("summary", report)  # where it has found nothing to look at, it is all that there is
        if summary["parsing_errors"] or not summary["passed"]:
            return {name: {f"checkov could not read the manifests: {summary}"} for name in texts}
        found: dict[str, set[str]] = {name: set() for name in texts}
        for each in report["results"]["failed_checks"]:
            found[Path(each["file_path"]).stem].add(each["check_id"])
        return found

    def alerts(self, manifests: Manifests, tests: Path = ALERT_TESTS) -> list[str]:
        """Whether Prometheus reads the alerts, and whether each fires as its tests say."""
        for each in manifests.of("PrometheusRule"):
            self.folder.joinpath("alerts.yaml").write_text(yaml.safe_dump(each["spec"]), encoding="utf-8")
        written = self.folder / "alert_tests.yaml"
        written.write_text(tests.read_text(encoding="utf-8"), encoding="utf-8")
        wrong = []
        for command in (["check", "rules", "alerts.yaml"], ["test", "rules", written.name]):
            done = self._run("promtool", *command)
            if done.returncode:
                wrong.append(done.stdout + done.stderr)
        return wrong

    def _run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [self.environment / "bin" / program, *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def accepted() -> dict[str, str]:
    """Findings of checkov that are accepted, with the reason that stands above each."""
    text = ACCEPTED.read_text(encoding="utf-8")
    found = re.findall(r"((?:^  # .+\n)+)  - (\w+)$", text, re.MULTILINE)
    reasons = {check: " ".join(line.strip(" #") for line in reason.splitlines()) for reason, check in found}
    assert list(reasons) == yaml.safe_load(text)["skip-check"], "each has a reason above it"
    return reasons


def crd_of(each: Object) -> dict[str, Any] | None:
    """The schema of a custom resource, which knows each field that there may be; None for what Kubernetes has itself.

    Raises LookupError for a custom resource whose schema is not here.
    """
    group, _, version = each["apiVersion"].rpartition("/")
    if "." not in group or group in _OF_KUBERNETES:
        return None
    for definition in _definitions():
        spec = definition["spec"]
        if spec["group"] == group and spec["names"]["kind"] == each["kind"]:
            for of_version in spec["versions"]:
                if of_version["name"] == version and of_version["served"]:
                    schema: dict[str, Any] = of_version["schema"]["openAPIV3Schema"]
                    return strict(schema)
    raise LookupError(f"no schema of {each['apiVersion']} {each['kind']} in {SCHEMAS}")


def strict(schema: Any) -> Any:
    """The same schema, which refuses fields that it does not name, as `kubectl apply` does. A flag in a pattern, which
    Go takes anywhere, is where Python takes it."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str) and "(?i)" in pattern:
        made["pattern"] = "(?i)" + pattern.replace("(?i)", "")
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        made["additionalProperties"] = False
    return made


def _definitions() -> Iterator[dict[str, Any]]:
    for path in sorted(SCHEMAS.glob("*.yaml")):
        yield from (each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each)
