"""The engine's numbers under vLLM's names, rendered as Prometheus text."""

from bisect import bisect_left

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Cumulative only when rendered; an observation is one bisection."""

    __slots__ = ("_bounds", "_buckets", "count", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        self._buckets[bisect_left(self._bounds, value)] += times
        self.sum += value * times
        self.count += times

    def render(self, name: str, labels: str) -> list[str]:
        lines = [f"# TYPE {name} histogram"]
        total = 0
        for bound, bucket in zip((*self._bounds, None), self._buckets, strict=True):
            total += bucket
            le = "+Inf" if bound is None else repr(bound)
            lines.append(f'{name}_bucket{{{labels},le="{le}"}} {float(total)}')
        lines.append(f"{name}_sum{{{labels}}} {self.sum}")
        lines.append(f"{name}_count{{{labels}}} {float(self.count)}")
        return lines


class EngineMetrics:
    """Counted since start, in tokens, requests and seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.rejections = 0
        self.finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.kv_pull_failures = 0
        self.ttft = Histogram(_TTFT_S)
        self.itl = Histogram(_ITL_S)
        self.tpot = Histogram(_ITL_S)
        self.e2e = Histogram(_LATENCY_S)
        self.queue = Histogram(_LATENCY_S)
        self.prefill = Histogram(_LATENCY_S)
        self.decode = Histogram(_LATENCY_S)


def quote_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Exposition:
    """Builds one scrape."""

    def __init__(self, model: str) -> None:
        self._labels = f'engine="0",model_name="{quote_label(model)}"'
        self._lines: list[str] = []

    def sample(self, kind: str, name: str, value: float, labels: str = "") -> None:
        self._lines.append(f"# TYPE vllm:{name} {kind}")
        self.another(name, value, labels)

    def another(self, name: str, value: float, labels: str = "") -> None:
        """One more series of the metric before it."""
        every = f"{self._labels},{labels}" if labels else self._labels
        self._lines.append(f"vllm:{name}{{{every}}} {float(value)}")

    def histogram(self, name: str, histogram: Histogram) -> None:
        self._lines += histogram.render(f"vllm:{name}", self._labels)

    def text(self) -> bytes:
        self._lines.append("")
        return "\n".join(self._lines).encode()
