"""Which waiting calls may go when something worth more arrives: first steps by priority and tenant. No clock.

Later steps of begun workflows are never here: what has begun is carried to its end.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from controlplane.domain.ids import RequestId, TenantId
from controlplane.domain.request import Request

_T = TypeVar("_T")


class _Level(Generic[_T]):
    """First steps of one priority. Tenants are kept by how many they have, so that the largest is found at once."""

    __slots__ = ("_by_size", "_most", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[TenantId, dict[RequestId, _T]] = {}
        self._by_size: dict[int, dict[TenantId, None]] = {}
        self._most = 0

    def add(self, tenant: TenantId, request_id: RequestId, item: _T) -> None:
        calls = self.tenants.setdefault(tenant, {})
        self._leave(tenant, len(calls))
        calls[request_id] = item
        self._join(tenant, len(calls))

    def remove(self, tenant: TenantId, request_id: RequestId) -> None:
        calls = self.tenants[tenant]
        self._leave(tenant, len(calls))
        del calls[request_id]
        if calls:
            self._join(tenant, len(calls))
        else:
            del self.tenants[tenant]
        while self._most and self._most not in self._by_size:
            self._most -= 1

    def largest_first(self) -> Iterator[dict[RequestId, _T]]:
        """Calls of each tenant, newest last; the tenant that has most of them first."""
        for size in range(self._most, 0, -1):
            for tenant in self._by_size.get(size, ()):
                yield self.tenants[tenant]

    def _join(self, tenant: TenantId, size: int) -> None:
        self._by_size.setdefault(size, {})[tenant] = None
        self._most = max(self._most, size)

    def _leave(self, tenant: TenantId, size: int) -> None:
        group = self._by_size.get(size)
        if group is not None:
            group.pop(tenant, None)
            if not group:
                del self._by_size[size]


class Displaceable(Generic[_T]):
    """Every waiting first step. The items are whatever the queue keeps."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: dict[int, _Level[_T]] = {}

    def add(self, request: Request, item: _T) -> None:
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level()
        level.add(request.tenant, request.id, item)

    def remove(self, request: Request) -> None:
        level = self._levels[request.priority]
        level.remove(request.tenant, request.id)
        if not level.tenants:
            del self._levels[request.priority]

    def worth_less(self, request: Request) -> Iterator[_T]:
        """What may go for `request`, least worth first. Nothing may change while this is read.

        Lower priorities, in each the tenant with most calls first and its newest first; then, of the same
        priority, those that the largest tenant has more than the caller's tenant would have. A later
        step of a begun workflow is worth more than any first step.
        """
        for priority in sorted(self._levels):
            level = self._levels[priority]
            if priority < request.priority or request.is_begun:
                for calls in level.largest_first():
                    yield from reversed(calls.values())
            elif priority == request.priority:
                mine = len(level.tenants.get(request.tenant, ()))
                largest = next(level.largest_first())
                spare = range(len(largest) - mine - 1)
                for _, item in zip(spare, reversed(largest.values()), strict=False):
                    yield item
