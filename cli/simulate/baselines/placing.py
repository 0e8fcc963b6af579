"""What baselines have in common: who may be sent to, calls that find no engine, and own accounting."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cli.simulate.contracts import Call, EngineView, Floor, Pushes


class Placing(Pushes, ABC):
    """Pushes every call to an engine when it comes. Calls that find none wait for one to accept.

    A subclass says where: `choose` gets the engines that accept, never none of them. It may refuse the
    call itself and answer None.
    """

    name = "placing"

    def __init__(self) -> None:
        self._homeless: dict[str, Call] = {}

    @property
    def waiting(self) -> int:
        return len(self._homeless)

    @abstractmethod
    def choose(self, call: Call, engines: Sequence[EngineView]) -> int | None: ...

    def priority(self, call: Call) -> float:
        """What engines serve first is smallest; 0 for all is first come, first served."""
        del call
        return 0.0

    def accepting(self, call: Call) -> list[EngineView]:
        """Engines that serve the call's model, have room for its context and take calls."""
        return [engine for engine in self.floor.engines if self.floor.can_take(call, engine.index)]

    def arrived(self, call: Call) -> None:
        engines = self.accepting(call)
        if not engines:
            self._homeless[call.id] = call
            return
        self._homeless.pop(call.id, None)
        engine = self.choose(call, engines)
        if engine is not None:
            self.sending(call, engine)
            self.floor.send(call, engine, self.priority(call))

    def sending(self, call: Call, engine: int) -> None:
        """Called just before the call is sent, for own accounting."""

    def failed(self, call: Call) -> None:
        self.arrived(call)

    def expired(self, call: Call) -> None:
        self._homeless.pop(call.id, None)

    def engine_changed(self, engine: int) -> None:
        if self.floor.engines[engine].is_accepting:
            for call in list(self._homeless.values()):
                self.arrived(call)


class Ledger:
    """Tokens of calls in flight by engine, counted by the router that sent them: prompt tokens still to
    be computed, and all tokens that the calls hold. Never older than now, unlike telemetry.
    """

    def __init__(self, engines: int) -> None:
        self.prefill_tokens = [0] * engines
        self.held_tokens = [0] * engines
        self._sent: dict[str, tuple[int, int, int]] = {}

    def sent(self, call: Call, engine: int, uncached_tokens: int) -> None:
        self.ended(call)
        self._sent[call.id] = (engine, uncached_tokens, call.prompt_tokens)
        self.prefill_tokens[engine] += uncached_tokens
        self.held_tokens[engine] += call.prompt_tokens

    def first_token(self, call: Call) -> None:
        entry = self._sent.get(call.id)
        if entry is not None:
            engine, uncached_tokens, held_tokens = entry
            self.prefill_tokens[engine] -= uncached_tokens
            self._sent[call.id] = (engine, 0, held_tokens)

    def ended(self, call: Call) -> None:
        """The call has left its engine, however it ended."""
        entry = self._sent.pop(call.id, None)
        if entry is not None:
            engine, uncached_tokens, held_tokens = entry
            self.prefill_tokens[engine] -= uncached_tokens
            self.held_tokens[engine] -= held_tokens


class Counting(Placing):
    """A placing strategy with a ledger of what it sent."""

    ledger: Ledger

    def begin(self, floor: Floor) -> None:
        super().begin(floor)
        self.ledger = Ledger(len(floor.engines))

    def uncached(self, call: Call, engine: int) -> int:
        return max(1, call.prompt_tokens - self.floor.cached_tokens(call, engine))

    def sending(self, call: Call, engine: int) -> None:
        self.ledger.sent(call, engine, self.uncached(call, engine))

    def first_token(self, call: Call) -> None:
        self.ledger.first_token(call)

    def ended(self, call: Call) -> None:
        self.ledger.ended(call)

    def failed(self, call: Call) -> None:
        self.ledger.ended(call)
        super().failed(call)

    def expired(self, call: Call) -> None:
        self.ledger.ended(call)
        super().expired(call)


def least_loaded(engines: Sequence[EngineView]) -> EngineView:
    """Fewest of our calls in flight; the first of equals."""
    return min(engines, key=lambda engine: (engine.in_flight, engine.index))
