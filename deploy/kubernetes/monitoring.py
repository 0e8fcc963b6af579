"""Prints what Prometheus and Grafana of a cluster read: rules as a PrometheusRule, each dashboard as a ConfigMap.

    python deploy/kubernetes/monitoring.py --namespace monitoring | kubectl apply --server-side -f -

Dashboards get the label that Grafana's sidecar looks for. Nothing is changed in them: they are those of
`dashboards/`, so that there is one copy of each.
"""
# A script, and no part of a package.
# ruff: noqa: INP001

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

DASHBOARDS: Final = Path(__file__).resolve().parents[2] / "dashboards"
# Of all that a ConfigMap holds, by Kubernetes itself.
CONFIG_MAP_BYTES_MAX: Final = 1024 * 1024


class TooLarge(Exception):
    """A dashboard that no ConfigMap can hold."""


def objects(folder: Path, namespace: str) -> Iterator[dict[str, Any]]:
    """Objects for the dashboards and rules in `folder`. Raises TooLarge."""
    for path in sorted(folder.glob("grafana/*.json")):
        text = path.read_text("utf-8")
        if len(text.encode()) > CONFIG_MAP_BYTES_MAX:
            raise TooLarge(f"{path} has more than {CONFIG_MAP_BYTES_MAX} bytes")
        yield {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"headway-dashboard-{_slug(path.stem)}",
                "namespace": namespace,
                "labels": {"app.kubernetes.io/part-of": "headway", "grafana_dashboard": "1"},
                "annotations": {"grafana_folder": "Headway"},
            },
            "data": {path.name: text},
        }
    groups: list[Any] = []
    for path in sorted(folder.glob("prometheus/*.yaml")):
        document = yaml.safe_load(path.read_text("utf-8"))
        # Tests of rules and configurations of servers lie beside them.
        if isinstance(document, dict) and document.keys() == {"groups"}:
            groups += document["groups"]
    if groups:
        yield {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {
                "name": "headway",
                "namespace": namespace,
                "labels": {"app.kubernetes.io/part-of": "headway"},
            },
            "spec": {"groups": groups},
        }


def _slug(stem: str) -> str:
    """A part of an object's name: lower case, and without what all of them begin with."""
    return stem.replace("_", "-").lower().removeprefix("headway-")


def main() -> int:
    """Exit code 0, or 1 when there is nothing to print or something can not be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--namespace", default="monitoring", help="where both are watched for")
    parser.add_argument("--folder", type=Path, default=DASHBOARDS, help="where both lie")
    given = parser.parse_args()
    try:
        found = list(objects(given.folder, given.namespace))
    except TooLarge as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not found:
        sys.stderr.write(f"error: {given.folder} has neither grafana/*.json nor rules\n")
        return 1
    yaml.safe_dump_all(found, sys.stdout, sort_keys=False, width=1_000_000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
