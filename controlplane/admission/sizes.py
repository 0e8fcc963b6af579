"""How large a workflow is, told by the deadline that it names: learned from those that ended. No clock.

Who wants an answer sooner usually asks for less, so the time that a workflow is given says more about
its size than the mean of its class does; where deadlines say nothing, nothing is read from them. Two
numbers are learned for each tenant and scope, both as a line in logarithms over the time given: the
work (milliseconds that its calls take on an empty engine as engines usually are; of a lone call for
each token that is expected of it), and its tolerance (how many times longer than that its calls may
take so that it still ends in time, pauses between its steps not counted).
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import exp, log
from typing import Final, NamedTuple

from controlplane.domain.catalog import Scope

# One more workflow counts for this share of what is known, at the least.
LEARNING_GAIN: Final = 0.02
ENDED_MIN: Final = 6
LINES_MAX: Final = 10_000
# Squared deviation of the logarithm of given times below which a slope is not believed.
SLOPE_RIDGE: Final = 0.1
# The mean of a lognormal exceeds its median by half the variance; of few observations at most by this.
VARIANCE_MAX: Final = 2.0
TOLERANCE_MIN: Final = 0.1
TOLERANCE_MAX: Final = 1_000.0


class Size(NamedTuple):
    """`work_ms` on an empty engine, expected, and how many times longer the calls may take."""

    work_ms: float
    tolerance: float

    @property
    def slack_ms(self) -> float:
        """What its calls may take longer than on an empty engine, in all."""
        return self.work_ms * (self.tolerance - 1.0)


class _Line:
    """Least squares of two values over one, the latest counting most."""

    __slots__ = ("count", "t", "tt", "tx", "w", "ww", "wx", "x", "xx")

    def __init__(self) -> None:
        self.count = 0.0
        self.x = self.xx = self.w = self.ww = self.wx = self.t = self.tt = self.tx = 0.0

    def add(self, x: float, work: float, tolerance: float) -> None:
        kept = 1.0 - LEARNING_GAIN
        self.count = self.count * kept + 1.0
        self.x = self.x * kept + x
        self.xx = self.xx * kept + x * x
        self.w = self.w * kept + work
        self.ww = self.ww * kept + work * work
        self.wx = self.wx * kept + work * x
        self.t = self.t * kept + tolerance
        self.tx = self.tx * kept + tolerance * x

    def at(self, x: float) -> tuple[float, float]:
        """Logarithms of the mean of the first value, and of the median of the second, at `x`."""
        count = self.count
        mean_x, mean_w, mean_t = self.x / count, self.w / count, self.t / count
        spread = max(0.0, self.xx / count - mean_x * mean_x) + SLOPE_RIDGE
        shared = self.wx / count - mean_x * mean_w
        left = max(0.0, self.ww / count - mean_w * mean_w - shared * shared / spread)
        work = mean_w + shared / spread * (x - mean_x) + 0.5 * min(left, VARIANCE_MAX)
        shared = self.tx / count - mean_x * mean_t
        return work, mean_t + shared / spread * (x - mean_x)


class Sizes:
    """One pool's. Owned by one task."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()

    def learn(
        self,
        tenant: str,
        scope: Scope,
        priority: int,
        *,
        given_ms: float,
        tokens: float,
        work_ms: float,
        tolerance: float,
    ) -> None:
        """A workflow of which `tokens` were expected has ended after `work_ms` of work."""
        x = log(max(given_ms, 1.0))
        work = log(max(work_ms, 1.0) / max(tokens, 1.0))
        tolerates = log(min(TOLERANCE_MAX, max(TOLERANCE_MIN, tolerance)))
        for key in ((tenant, scope), (priority, scope), None):
            self._line(key).add(x, work, tolerates)

    def of(
        self, tenant: str, scope: Scope, priority: int, *, given_ms: float, tokens: float
    ) -> Size | None:
        """What to expect of a workflow; None while too few have ended to tell."""
        for key in ((tenant, scope), (priority, scope), None):
            line = self._lines.get(key)
            if line is not None and line.count >= ENDED_MIN:
                work, tolerance = line.at(log(max(given_ms, 1.0)))
                return Size(exp(work) * max(tokens, 1.0), exp(tolerance))
        return None

    def _line(self, key: Hashable) -> _Line:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= LINES_MAX:
                self._lines.popitem(last=False)
            line = self._lines[key] = _Line()
        else:
            self._lines.move_to_end(key)
        return line
