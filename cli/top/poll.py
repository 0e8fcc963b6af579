"""Asks the server for the overview at a bounded rate, one request a time, and says when it is away."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import httpx2

from cli.client import JsonObject
from cli.failure import CommandFailure, ExitCode

REQUEST_S_MAX: Final = 10.0
ROWS_MAX: Final = 200
# While the server is away, the pause before it is asked again doubles up to this.
AWAY_PAUSE_S_MAX: Final = 10.0


@dataclass(frozen=True, slots=True)
class Away:
    """Why there was no answer. `is_final`: asking again does not help."""

    words: str
    is_final: bool = False


class Poller:
    """One connection to the operator API. Closed by leaving its `async with` block."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        try:
            self._client = httpx2.AsyncClient(
                base_url=url,
                headers={"authorization": f"Bearer {key}", "user-agent": "headway-cli"},
                timeout=REQUEST_S_MAX,
                trust_env=False,
            )
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise CommandFailure(
                ExitCode.USAGE, f"`{url}` is not a URL: {error}", "write it as http://HOST:PORT"
            ) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def overview(
        self, parts: Sequence[str], only: Mapping[str, str], window_s: int
    ) -> JsonObject | Away:
        """The parts that a view shows, narrowed by `only`."""
        query: list[tuple[str, str]] = [("part", part) for part in parts]
        query += [*only.items(), ("window_s", str(window_s)), ("limit", str(ROWS_MAX))]
        return await self.get("overview", query)

    async def get(self, path: str, query: Sequence[tuple[str, str]] = ()) -> JsonObject | Away:
        """A document of the operator API, or why there is none."""
        try:
            response = await self._client.get(f"/operator/v1/{path}", params=list(query))
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            return Away(f"`{self.url}` is not a URL: {error}", is_final=True)
        except httpx2.HTTPError as error:
            return Away(str(error) or type(error).__name__)
        try:
            document = response.json()
        except ValueError:
            return Away(f"{response.status_code} without a Headway body")
        if response.is_success:
            return document if isinstance(document, dict) else Away("an answer that is no object")
        told = document.get("error") if isinstance(document, dict) else None
        words = told.get("message", "") if isinstance(told, dict) else ""
        return Away(
            f"{words or response.status_code}", is_final=response.status_code in {401, 403, 404}
        )
