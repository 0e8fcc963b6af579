"""Tells every replica that the rollout of policies has changed, so that none has to find it out by itself.

A message is a nudge and says nothing: PostgreSQL is asked what rules. One that is lost, or a bus that is
away, costs the time until the next look, POLICY_INTERVAL_S.
"""

import contextlib

from controlplane.bus import Bus
from controlplane.domain.errors import BusUnavailable
from controlplane.runtime.policy_state import PolicyState
from dataplane.protocol import subjects
from policies.evaluate import Policy


class PolicyNews:
    """Belongs to the event loop of its PolicyState."""

    def __init__(self, policies: PolicyState, bus: Bus) -> None:
        self._policies = policies
        self._bus = bus

    async def join(self) -> None:
        """Hear of changes from now on, over reconnects as well."""
        await self._bus.subscribe(subjects.CONTROL_POLICIES, self._on_news)

    async def changed(self, policy: Policy | None = None) -> None:
        """The rollout was changed here. `policy` is the bundle that came with it, as it was checked."""
        if policy is not None:
            self._policies.keep(policy)
        self._policies.woken.set()
        with contextlib.suppress(BusUnavailable):
            await self._bus.publish(subjects.CONTROL_POLICIES, b"{}")

    def _on_news(self, _subject: str, _data: bytes) -> None:
        self._policies.woken.set()
