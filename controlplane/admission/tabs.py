"""What each begun workflow has taken so far. Bounded, no clock."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from controlplane.domain.catalog import Scope

TABS_MAX: Final = 100_000
# A workflow that nobody ended is forgotten so long after its deadline.
KEPT_MS: Final = 60_000


@dataclass(slots=True)
class Tab:
    """`tokens` were expected when it began, and `tolerance` (None: not known). Of its calls so far: `work_ms`
    on an empty engine as engines usually are, as `tolerance` is, `busy_ms` on theirs, `waited_ms` in the
    queue. Who `is_urgent` can not spare the time until a seat is free.
    """

    tenant: str
    scope: Scope
    priority: int
    begun_ms: int
    deadline_ms: int
    tokens: float
    is_urgent: bool
    tolerance: float | None = None
    work_ms: float = 0.0
    busy_ms: float = 0.0
    waited_ms: float = 0.0


class Tabs:
    """By workflow, the longest open first."""

    __slots__ = ("_by_key",)

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, Tab] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, key: str, tab: Tab) -> None:
        if len(self._by_key) >= TABS_MAX:
            self._by_key.popitem(last=False)
        self._by_key[key] = tab

    def get(self, key: str) -> Tab | None:
        return self._by_key.get(key)

    def close(self, key: str) -> Tab | None:
        return self._by_key.pop(key, None)

    def tick(self, now_ms: int) -> None:
        """Forget the longest open ones that are past their deadlines and were never ended."""
        while self._by_key:
            key, tab = next(iter(self._by_key.items()))
            if now_ms <= tab.deadline_ms + KEPT_MS:
                return
            del self._by_key[key]
