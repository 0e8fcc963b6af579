"""Manifests, units, the image and NATS' configuration, rendered and held against the program that they start."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from controlplane.api.health import READY_CHECK_S_MAX
from controlplane.bootstrap import JOURNAL_DRAIN_S_MAX
from controlplane.embedded.nats import agent_user, control_user, user_entry
from controlplane.gateway.server import GRACEFUL_S_MAX
from controlplane.settings import Settings
from dataplane.agent.keeper import STOP_WITHDRAW_S_MAX
from dataplane.agent.main import BYE_S_MAX
from dataplane.agent.ports import PORT_FIRST, PORT_LAST
from dataplane.agent.process import KILL_S_MAX
from dataplane.agent.settings import read_engines, read_settings
from dataplane.engines.profiles import built_in
from tests import surface

DEPLOY = surface.ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SYSTEMD = DEPLOY / "systemd"
FOLDERS = sorted(
    str(path.parent.relative_to(KUBERNETES))
    for path in KUBERNETES.rglob("kustomization.yaml")
    if "components" not in path.parts
)
# `preStop: {sleep}` is on by default since the first of them; the other is the newest that is known here.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
# Kinds of operators, for which Kubernetes has no schema; their templates of pods are checked all the same.
OTHERS = {"PodMonitor", "ScaledObject", "LeaderWorkerSet"}
SECRETS = {"DATABASE_URL", "HEADWAY_PEPPER", "HEADWAY_NATS_PASSWORD", "HEADWAY_AGENT_PASSWORD"}
SECRET_VALUES = {
    "DATABASE_URL": "postgresql://headway:secret@db/headway",
    "HEADWAY_PEPPER": "a pepper of sixteen characters",
    "HEADWAY_NATS_PASSWORD": "secret",
}
FIELDS = {"spec.nodeName": "gpu-1", "status.hostIP": "192.0.2.7", "metadata.name": "llama-405b-0"}

Object = dict[str, Any]


# ---------------------------------------------------------------- rendering


def walk(folder: Path) -> Iterator[Object]:
    """Resources of a kustomization without its patches: what there is where `kubectl` is not."""
    document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in (*document.get("resources", ()), *document.get("components", ())):
        path = folder / name
        if path.is_dir():
            yield from walk(path)
        else:
            yield from (found for found in yaml.safe_load_all(path.read_text()) if found)


@cache
def rendered(folder: str) -> tuple[Object, ...]:
    """Objects as they reach a cluster."""
    if shutil.which("kubectl") is None:
        return tuple(walk(KUBERNETES / folder))
    done = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def every() -> list[Object]:
    return [found for folder in FOLDERS for found in rendered(folder)]


def of_kind(kind: str, objects: tuple[Object, ...] | list[Object]) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def templates(found: Object) -> Iterator[Object]:
    """Templates of pods anywhere in an object."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name in {"template", "leaderTemplate", "workerTemplate"} and "spec" in value:
                yield value
            else:
                yield from templates(value)
    elif isinstance(found, list):
        for value in found:
            yield from templates(value)


def containers(template: Object) -> list[Object]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def pods() -> list[tuple[tuple[Object, ...], Object]]:
    return [
        (objects, template)
        for folder in FOLDERS
        if (objects := rendered(folder))
        for found in objects
        for template in templates(found)
    ]


def started(container: Object) -> list[str]:
    """What a container starts, after the entry point of the image."""
    own = container.get("command")
    return [*own, *container.get("args", ())] if own else ["headway", *container["args"]]


def environment(container: Object, objects: tuple[Object, ...]) -> dict[str, str]:
    """A container's environment with its references followed; a secret has a value that could be."""
    # A part of a deployment may lean on what another part brings.
    maps = {found["metadata"]["name"]: found["data"] for found in of_kind("ConfigMap", every())}
    maps |= {found["metadata"]["name"]: found["data"] for found in of_kind("ConfigMap", objects)}
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    for entry in container.get("env", ()):
        name, source = entry["name"], entry.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[name] = SECRET_VALUES[name]
        elif "fieldRef" in source:
            found[name] = FIELDS[source["fieldRef"]["fieldPath"]]
        else:
            found[name] = re.sub(r"\$\(([A-Z_]+)\)", lambda named: found[named[1]], entry["value"])
    return found


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_the_shape_that_kubernetes_knows(folder: str, version: str) -> None:
    objects = rendered(folder)
    assert objects
    for found in objects:
        if found["kind"] not in OTHERS:
            kubernetes_validate.validate(found, version, strict=True)
        for template in templates(found):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **template}
            kubernetes_validate.validate(pod, version, strict=True)


def test_what_pods_start_is_what_the_program_takes() -> None:
    seen = set()
    for objects, template in pods():
        for container in containers(template):
            program, *words = started(container)
            if program != "headway":
                continue
            assert surface.problems_of_command(words) == []
            given = environment(container, objects)
            known = {
                "serve": surface.serve_variables(),
                "agent": surface.agent_variables(),
                "db": {"DATABASE_URL"},
            }[words[0]]
            assert given.keys() - known - surface.OTEL_SDK == set(), words
            seen.add(words[0])
    assert seen == {"serve", "agent", "db"}


def test_settings_of_replicas_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0
    for objects, template in pods():
        for container in containers(template):
            if started(container)[:2] != ["headway", "serve"]:
                continue
            for name, value in environment(container, objects).items():
                monkeypatch.setenv(name, value)
            settings = Settings()
            ports = [port["containerPort"] for port in container["ports"]]
            assert ports == [settings.port]
            assert settings.host == "0.0.0.0"
            counted += 1
    assert counted >= 3


def test_settings_of_agents_can_be_used(tmp_path: Path) -> None:
    files = {
        name: text
        for found in of_kind("ConfigMap", every())
        for name, text in found["data"].items()
        if name.endswith(".yaml")
    }
    assert set(files) == {"gpu-1.yaml", "llama-405b-0.yaml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert read_engines(tmp_path / name, built_in())
    (tmp_path / "password").write_text("secret")
    nodes = []
    for objects, template in pods():
        for container in containers(template):
            program, *words = started(container)
            if [program, *words[:1]] != ["headway", "agent"]:
                continue
            given = environment(container, objects)
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert given["HEADWAY_AGENT_DATA"] in mounts
            password = words[words.index("--password-file") + 1]
            # One node's password of all that are in the Secret.
            assert mounts[password]["subPathExpr"] == "$(HEADWAY_NODE_ID)"
            words[words.index(password)] = str(tmp_path / "password")
            if engines := given.get("HEADWAY_AGENT_ENGINES"):
                assert str(Path(engines).parent) in mounts
                # An executable of the image is not here.
                given.pop("HEADWAY_AGENT_ENGINES")
            settings = read_settings(words[1:], given)
            grace_s = STOP_WITHDRAW_S_MAX + BYE_S_MAX + settings.stop_grace_s + KILL_S_MAX
            assert template["spec"]["terminationGracePeriodSeconds"] >= grace_s
            nodes.append(settings.node_id)
    assert set(nodes) == {"gpu-1", "llama-405b-0"}


def test_what_agents_attach_to_is_what_stands_beside_them() -> None:
    [engine] = of_kind("LeaderWorkerSet", rendered("examples/large-engine"))
    [settings] = of_kind("ConfigMap", rendered("examples/large-engine"))
    [[declared]] = [yaml.safe_load(text) for text in settings["data"].values()]
    template = engine["spec"]["leaderWorkerTemplate"]
    leader = template["leaderTemplate"]
    server, agent = leader["spec"]["containers"]
    flags = dict(flag.removeprefix("--").split("=") for flag in server["args"] if "=" in flag)
    given = environment(agent, rendered("examples/large-engine"))
    options = declared["options"]
    assert options["attach"] == f"http://{given['HEADWAY_BIND_ADDRESS']}:{flags['port']}"
    for name in ("max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size"):
        assert flags[name.replace("_", "-")] == str(options[name])
    gpus = int(server["resources"]["limits"]["nvidia.com/gpu"]) * template["size"]
    assert declared["gpus"] == gpus
    assert gpus == options["tensor_parallel_size"] * options["pipeline_parallel_size"]
    assert declared["model"] in server["command"]
    assert leader["spec"]["terminationGracePeriodSeconds"] > int(flags["shutdown-timeout"])


def test_a_replica_gets_the_time_that_it_takes_to_stop() -> None:
    for objects in map(rendered, FOLDERS):
        for found in of_kind("Deployment", objects):
            spec = found["spec"]["template"]["spec"]
            [container] = spec["containers"]
            drain_s = float(environment(container, objects)["HEADWAY_DRAIN_S_MAX"])
            before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            # Calls are waited for before the server stops, and once more before what it holds is given back.
            needed_s = before_s + 2 * drain_s + GRACEFUL_S_MAX + 2 * JOURNAL_DRAIN_S_MAX
            assert spec["terminationGracePeriodSeconds"] >= needed_s
            assert container["readinessProbe"]["timeoutSeconds"] > READY_CHECK_S_MAX


def test_probes_scrapes_and_ports_are_served() -> None:
    probed = set()
    for _, template in pods():
        for container in containers(template):
            names = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if get := container.get(probe, {}).get("httpGet"):
                    assert get["port"] in names
                    if started(container)[0] == "headway":
                        assert surface.is_served("GET", get["path"]), get
                        probed.add(get["path"])
        notes = template.get("metadata", {}).get("annotations", {})
        if "prometheus.io/path" in notes:
            assert surface.is_served("GET", notes["prometheus.io/path"])
            assert int(notes["prometheus.io/port"]) in names.values()
    assert probed == {"/health/live", "/health/ready"}
    [monitor] = of_kind("PodMonitor", every())
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert surface.is_served("GET", endpoint["path"])


def test_selectors_find_pods_and_references_find_objects() -> None:
    labels = [template["metadata"]["labels"] for _, template in pods()]

    def finds(selector: Mapping[str, str]) -> bool:
        return any(selector.items() <= each.items() for each in labels)

    selecting = 0
    for found in every():
        spec = found.get("spec", {})
        match found["kind"]:
            case "Service":
                assert finds(spec["selector"]), found
            case "PodDisruptionBudget" | "PodMonitor":
                assert finds(spec["selector"]["matchLabels"]), found
            case "NetworkPolicy":
                assert finds(spec["podSelector"]["matchLabels"]), found
            case "HorizontalPodAutoscaler" | "ScaledObject":
                target = spec["scaleTargetRef"]
                names = {each["metadata"]["name"] for each in of_kind(target["kind"], every())}
                assert target["name"] in names
            case _:
                continue
        selecting += 1
    assert selecting >= 10
    accounts = {found["metadata"]["name"] for found in of_kind("ServiceAccount", every())}
    for _, template in pods():
        account = template["spec"].get("serviceAccountName")
        assert account is None or account in accounts


def test_the_network_policy_opens_what_the_program_uses() -> None:
    policies = {found["metadata"]["name"]: found for found in of_kind("NetworkPolicy", every())}
    egress = policies["headway-control-plane"]["spec"]["egress"]
    ranges = [
        (port["port"], port.get("endPort", port["port"]))
        for rule in egress
        for port in rule["ports"]
    ]
    assert (PORT_FIRST, PORT_LAST) in ranges
    settings = {
        name: value
        for found in of_kind("ConfigMap", every())
        for name, value in found["data"].items()
    }
    for name in ("NATS_URL", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        port = int(settings[name].rpartition(":")[2])
        assert (port, port) in ranges, name


def test_nobody_runs_as_root_or_writes_where_nothing_is_written() -> None:
    for _, template in pods():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            assert "memory" in {**container["resources"]["requests"]}
            if own.get("runAsUser") == 0:
                assert container["command"][0] == "/bin/chown"
            if started(container)[:2] in (["headway", "serve"], ["headway", "db"]):
                assert own["readOnlyRootFilesystem"] is True


def test_secrets_are_only_referred_to() -> None:
    for found in of_kind("ConfigMap", every()):
        assert found["data"].keys() & SECRETS == set()
    assert of_kind("Secret", every()) == []
    for _, template in pods():
        for container in containers(template):
            for entry in container.get("env", ()):
                if entry["name"] in SECRETS:
                    assert "secretKeyRef" in entry["valueFrom"]


def test_scalers_ask_for_series_that_there_are() -> None:
    queries = [
        trigger["metadata"]["query"]
        for found in of_kind("ScaledObject", every())
        for trigger in found["spec"]["triggers"]
    ]
    assert len(queries) == 2
    for query in queries:
        selector = promql_parser.parse(query).expr
        assert selector.name in surface.metric_names()
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked == surface.metric_labels()[selector.name]


def test_images_are_named_and_pinned_in_what_is_applied() -> None:
    for folder in FOLDERS:
        if folder in {"agents", "control-plane"}:
            continue
        for found in rendered(folder):
            for template in templates(found):
                for container in containers(template):
                    name, _, tag = container["image"].partition(":")
                    assert name in {"headway", "headway-agent"}
                    assert tag not in {"", "latest"}


# ---------------------------------------------------------------- dashboards and rules


def test_dashboards_and_rules_become_objects(tmp_path: Path) -> None:
    (tmp_path / "grafana").mkdir()
    (tmp_path / "prometheus").mkdir()
    (tmp_path / "grafana" / "request_path.json").write_text('{"title": "Request path"}')
    (tmp_path / "prometheus" / "alerts.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "a", "rules": [{"alert": "A", "expr": "up == 0"}]}]})
    )
    (tmp_path / "prometheus" / "alerts_test.yaml").write_text(
        "rule_files: [alerts.yaml]\ntests: []\n"
    )
    script = [sys.executable, str(KUBERNETES / "monitoring.py"), "--namespace", "watch", "--folder"]
    done = subprocess.run([*script, str(tmp_path)], capture_output=True, text=True, check=True)
    board, rules = yaml.safe_load_all(done.stdout)
    kubernetes_validate.validate(board, VERSIONS[-1], strict=True)
    assert json.loads(board["data"]["request_path.json"]) == {"title": "Request path"}
    assert board["metadata"]["name"] == "headway-dashboard-request-path"
    assert rules["spec"]["groups"] == [{"name": "a", "rules": [{"alert": "A", "expr": "up == 0"}]}]
    empty = subprocess.run([*script, str(tmp_path / "none")], capture_output=True, check=False)
    assert empty.returncode == 1


# ---------------------------------------------------------------- the image


def test_the_image_starts_what_there_is() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (surface.ROOT / source).exists(), source
    packages = re.findall(r'"([a-z]+)\*"', (surface.ROOT / "pyproject.toml").read_text())
    assert packages
    for package in packages:
        assert f"COPY {package} {package}" in lines
    starts = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("CMD ")]
    assert starts == [["serve"], ["agent"]]
    for words in starts:
        assert surface.problems_of_command(words) == []
    named = set(re.findall(r"\b((?:HEADWAY|NATS|DATABASE)_[A-Z_]+)\b", text))
    assert named <= surface.variables()
    assert len(re.findall(r"^USER 10001:10001$", text, re.MULTILINE)) == 2
    [health] = re.findall(r"'(/health/[a-z]+)'", text)
    assert surface.is_served("GET", health)


def test_the_runtime_lock_is_a_part_of_the_lock_that_is_enough() -> None:
    done = subprocess.run(
        [sys.executable, DEPLOY / "runtime_lock.py"], capture_output=True, text=True, check=True
    )
    lock = (surface.ROOT / "requirements.lock").read_text()
    names = set(re.findall(r"^([A-Za-z0-9._-]+)==", done.stdout, re.MULTILINE))
    assert {"fastapi", "psycopg", "psycopg-binary", "ortools", "typer", "setuptools"} <= names
    assert names & {"pytest", "mypy", "ruff", "hypothesis", "schemathesis"} == set()
    entry = re.compile(r"^[A-Za-z0-9._-]+==.*\n(?:    --hash=.*\n)+", re.MULTILINE)
    assert {each for each in entry.findall(lock) if each.partition("==")[0] in names} == set(
        entry.findall(done.stdout)
    )


# ---------------------------------------------------------------- systemd


def unit(name: str) -> dict[str, list[str]]:
    """Directives of a unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / f"{name}.service").read_text().splitlines():
        key, is_set, value = line.partition("=")
        if is_set and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def example(name: str, *, with_comments: bool) -> dict[str, str]:
    """Variables of an example of an environment; commented ones are as good as others."""
    lines = (SYSTEMD / f"{name}.env.example").read_text().splitlines()
    found = {}
    for line in lines:
        matched = re.fullmatch(r"(#?)([A-Z][A-Z0-9_]*)=(.*)", line)
        if matched and (with_comments or not matched[1]):
            found[matched[2]] = matched[3]
    return found


@pytest.mark.parametrize("name", ["headway-serve", "headway-agent"])
def test_units_start_what_there_is(name: str) -> None:
    directives = unit(name)
    [command] = directives["ExecStart"]
    program, *words = shlex.split(command)
    assert Path(program).name == "headway"
    assert surface.problems_of_command(words) == []
    for hardened in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert directives[hardened] == ["yes"]
    assert directives["ProtectSystem"] == ["strict"]
    assert directives["CapabilityBoundingSet"] == [""]
    assert directives["User"] != ["root"]


def test_units_give_the_time_that_a_stop_takes() -> None:
    drain_s = float(example("serve", with_comments=False)["HEADWAY_DRAIN_S_MAX"])
    needed_s = 2 * drain_s + GRACEFUL_S_MAX + 2 * JOURNAL_DRAIN_S_MAX
    assert float(unit("headway-serve")["TimeoutStopSec"][0]) >= needed_s
    words = shlex.split(unit("headway-agent")["ExecStart"][0])
    grace_s = float(words[words.index("--stop-grace-s") + 1])
    needed_s = STOP_WITHDRAW_S_MAX + BYE_S_MAX + grace_s + KILL_S_MAX
    assert float(unit("headway-agent")["TimeoutStopSec"][0]) >= needed_s
    # Engines outlive an agent that dies.
    assert unit("headway-agent")["KillMode"] == ["process"]


def test_examples_of_environments_can_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve = example("serve", with_comments=True)
    assert serve.keys() - surface.serve_variables() == set()
    for name, value in example("serve", with_comments=False).items():
        monkeypatch.setenv(name, value)
    assert Settings().port == 8080
    agent = example("agent", with_comments=True)
    assert agent.keys() - surface.agent_variables() == {"HF_HOME", "HF_TOKEN"}
    given = example("agent", with_comments=False)
    engines = tmp_path / "engines.yaml"
    engines.write_text("[]")
    read_settings([], given | {"HEADWAY_AGENT_ENGINES": str(engines), "HEADWAY_AGENT_DATA": "/x"})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_units() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", *sorted(SYSTEMD.glob("*.service"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert said == []


# ---------------------------------------------------------------- NATS


def print_users(folder: Path, *nodes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEPLOY / "nats" / "users.py", "--folder", folder, *nodes],
        env={**os.environ, "PYTHONPATH": str(surface.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_users_of_nats_have_the_permissions_of_the_code(tmp_path: Path) -> None:
    done, again = (print_users(tmp_path, "gpu-1", "gpu-2") for _ in range(2))
    assert done.stdout == again.stdout
    printed = json.loads(done.stdout.partition(": ")[2])["users"]
    users = [control_user(tmp_path), *(agent_user(tmp_path, node) for node in ("gpu-1", "gpu-2"))]
    assert printed == [user_entry(user) for user in users]
    for user in users:
        path = tmp_path / "passwords" / user.name
        assert path.read_text().strip() == user.password
        assert path.stat().st_mode & 0o077 == 0
    assert "permissions" not in printed[0]
    for subject in printed[1]["permissions"]["publish"]["allow"]:
        assert "gpu-1" in subject
    refused = print_users(tmp_path, "gpu.1")
    assert refused.returncode == 2
    assert "`gpu.1`" in refused.stderr


def test_nats_takes_its_configuration(tmp_path: Path) -> None:
    from controlplane.embedded.nats import PAYLOAD_BYTES_MAX, _program

    (tmp_path / "users.conf").write_text(print_users(tmp_path, "gpu-1").stdout)
    text = (DEPLOY / "nats" / "nats.conf").read_text()
    assert f"max_payload: {PAYLOAD_BYTES_MAX // 1024**2}MB" in text
    (tmp_path / "nats.conf").write_text(text.replace("/var/lib/nats", str(tmp_path)))
    tried = subprocess.run(
        [_program(), "-t", "--config", tmp_path / "nats.conf"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode == 0, tried.stderr
