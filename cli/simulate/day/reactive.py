"""Scalers that look at what is: a fleet for the peak, Kubernetes' autoscaler on load, and a greedy one on KV use."""

from collections import deque
from math import ceil
from typing import Final

from cli.simulate.contracts import Condition
from cli.simulate.day.scaling import Seen, Simple, Wish

# Kubernetes' horizontal-pod-autoscaler: sync period, tolerance and the default of scaling up behaviour
# (the larger of 4 pods and 100 % in 15 s), as in its controller's flags and `autoscaling/v2` defaults.
HPA_INTERVAL_S: Final = 15.0
HPA_TOLERANCE: Final = 0.1
HPA_PODS_UP_MAX: Final = 4

# llm-d's workload-variant-autoscaler, saturation analyser V1: a replica is saturated at this KV use or
# this queue, one more is wanted when the mean spare of the others falls below the triggers.
WVA_INTERVAL_S: Final = 30.0
WVA_KV_RATIO: Final = 0.80
WVA_QUEUE_CALLS: Final = 5.0
WVA_KV_SPARE_RATIO: Final = 0.10
WVA_QUEUE_SPARE_CALLS: Final = 3.0
WVA_REPLICAS_MIN_FOR_DOWN: Final = 2


class Static(Simple):
    """A fleet that never changes."""

    def __init__(self, engines: float) -> None:
        self.engines_first = max(1, round(engines))

    def wants(self, seen: Seen) -> Wish:
        del seen
        return Wish(engines=self.engines_first)


def hpa_desired(current: int, load: float, target: float, tolerance: float = HPA_TOLERANCE) -> int:
    """ceil(current x ratio), where ratio is load per replica over the target; `current` while the ratio
    is within the tolerance of 1. Target in the unit of load. Raises ValueError on a target of 0 or less.
    """
    if target <= 0.0:
        raise ValueError("a target is above 0")
    if current <= 0:
        return ceil(load / target)
    ratio = load / current / target
    return current if abs(ratio - 1.0) <= tolerance else ceil(current * ratio)


class Hpa(Simple):
    """Kubernetes' autoscaler on calls in flight and in the queue per engine.

    `down_s` is its stabilisation window for scaling down: the highest wish of that time counts.
    """

    interval_s = HPA_INTERVAL_S

    def __init__(self, target: float, *, down_s: float, engines_first: int = 1) -> None:
        self.target = target
        self.down_s = down_s
        self.engines_first = engines_first
        self._wishes: deque[tuple[float, int]] = deque()

    def wants(self, seen: Seen) -> Wish:
        desired = max(1, hpa_desired(seen.there, seen.load, self.target))
        self._wishes.append((seen.now_s, desired))
        while self._wishes[0][0] < seen.now_s - self.down_s:
            self._wishes.popleft()
        if desired > seen.there:
            most = seen.there + max(HPA_PODS_UP_MAX, seen.there)
            return Wish(engines=min(desired, most))
        return Wish(engines=min(seen.there, max(wish for _, wish in self._wishes)))


class Greedy(Simple):
    """One engine more or less, as llm-d's workload-variant-autoscaler does by KV use and queue of engines.

    Calls that wait with the router are counted to the engines in equal parts. While one starts, no other
    is started. `kv_ratio` is where an engine counts as saturated, the published 0.8 or another.
    """

    interval_s = WVA_INTERVAL_S

    def __init__(
        self, kv_ratio: float, *, queue_calls: float = WVA_QUEUE_CALLS, engines_first: int = 1
    ) -> None:
        self.kv_ratio = kv_ratio
        self.queue_calls = queue_calls
        self.engines_first = engines_first

    def wants(self, seen: Seen) -> Wish:
        serving = [one for one in seen.engines if one.condition is Condition.SERVING]
        if not serving:
            return Wish(engines=max(1, seen.there))
        each = seen.waiting / len(serving)
        used = [(one.kv_used_ratio, one.waiting + each) for one in serving]
        free = [one for one in used if one[0] < self.kv_ratio and one[1] < self.queue_calls]
        is_starting = seen.there > len(serving)
        if not self._has_spare(free):
            return Wish(engines=seen.there + (not is_starting))
        if is_starting or len(free) < WVA_REPLICAS_MIN_FOR_DOWN:
            return Wish(engines=seen.there)
        # What one less would leave to the others: the load of N on N - 1.
        more = len(free) / (len(free) - 1)
        after = [(kv * more, queue * more) for kv, queue in free]
        return Wish(engines=seen.there - self._has_spare(after))

    def _has_spare(self, free: list[tuple[float, float]]) -> bool:
        if not free:
            return False
        kv_spare = sum(self.kv_ratio - kv for kv, _ in free) / len(free)
        queue_spare = sum(self.queue_calls - queue for _, queue in free) / len(free)
        kv_trigger = WVA_KV_SPARE_RATIO * self.kv_ratio / WVA_KV_RATIO
        queue_trigger = WVA_QUEUE_SPARE_CALLS * self.queue_calls / WVA_QUEUE_CALLS
        return kv_spare >= kv_trigger and queue_spare >= queue_trigger
