"""A small client of the operator API: turns answers that are no answers into CommandFailure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx2

from cli.failure import CommandFailure, ExitCode
from controlplane.embedded.process import write_private

DATA_DIR = Path(".headway")
OPERATOR_FILE = "operator.json"
REQUEST_S_MAX = 15.0

JsonObject = dict[str, Any]
Query = str | int | Sequence[str] | None


class OperatorClient:
    """Blocking calls to `/operator/v1`. Closed by leaving its `with` block.

    `reason` goes with every change, for the audit log; empty: none is given.
    """

    def __init__(self, url: str, key: str, *, reason: str = "") -> None:
        self.url = url
        self._why = {"reason": reason} if reason else None
        self._client = httpx2.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}", "user-agent": "headway-cli"},
            timeout=REQUEST_S_MAX,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Query) -> JsonObject:
        return self._call("GET", path, query=query)

    def post(self, path: str, body: JsonObject | None = None) -> JsonObject:
        return self._call("POST", path, query=self._why, body=body)

    def patch(self, path: str, body: JsonObject) -> JsonObject:
        return self._call("PATCH", path, query=self._why, body=body)

    def delete(self, path: str) -> JsonObject:
        return self._call("DELETE", path, query=self._why)

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Query] | None = None,
        body: JsonObject | None = None,
    ) -> JsonObject:
        params = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            response = self._client.request(
                method, f"/operator/v1/{path}", params=params, json=body
            )
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise CommandFailure(
                ExitCode.USAGE,
                f"`{self.url}` is not a URL: {error}",
                "write it as http://HOST:PORT",
            ) from error
        except httpx2.TransportError as error:
            raise CommandFailure(
                ExitCode.UNREACHABLE,
                f"no answer from {self.url}: {str(error) or type(error).__name__}",
                "start one with `headway up`, or name another with --url or HEADWAY_URL",
            ) from error
        return _answer(response)


def segment(text: str) -> str:
    """One path segment of a URL, whatever a person typed."""
    return quote(text, safe="")


def _answer(response: httpx2.Response) -> JsonObject:
    try:
        document = response.json()
    except ValueError:
        document = None
    if response.is_success and isinstance(document, dict):
        return document
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        raise CommandFailure(
            ExitCode.FAILED,
            f"{response.url} answered {response.status_code} without a Headway body",
            "check that --url names a Headway server",
        )
    remedies = {
        401: "give an operator key with --key or HEADWAY_OPERATOR_KEY",
        503: "try again in a moment",
    }
    code = error.get("code")
    raise CommandFailure(
        ExitCode.FAILED,
        f"{error.get('message')} ({code})",
        remedies.get(response.status_code, ""),
        reason=str(code or ""),
    )


def write_connection(data_dir: Path, url: str, key: str) -> Path:
    """Keeps URL and key where `connection` finds them, readable by the owner only."""
    path = data_dir / OPERATOR_FILE
    write_private(path, json.dumps({"url": url, "key": key}) + "\n")
    return path
