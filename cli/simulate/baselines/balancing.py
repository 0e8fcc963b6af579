"""Load balancers that know nothing of caches: round robin, least request, power of two choices."""

from collections.abc import Sequence

from cli.simulate.baselines.placing import Placing, least_loaded
from cli.simulate.contracts import Call, EngineView


class RoundRobin(Placing):
    name = "round-robin"

    def __init__(self) -> None:
        super().__init__()
        self._turn = -1

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        del call
        self._turn += 1
        return engines[self._turn % len(engines)].index


class LeastRequest(Placing):
    """Envoy's LEAST_REQUEST over all hosts: fewest requests in flight."""

    name = "least-request"

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        del call
        fewest = min(engine.in_flight for engine in engines)
        return self.floor.random.choice(
            [engine.index for engine in engines if engine.in_flight == fewest]
        )


class PowerOfTwo(Placing):
    """Of two drawn engines the one with fewer requests in flight (Mitzenmacher)."""

    name = "power-of-two"

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        del call
        drawn = self.floor.random.sample(list(engines), min(2, len(engines)))
        return least_loaded(drawn).index
