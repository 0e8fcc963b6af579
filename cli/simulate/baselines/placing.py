"""What baselines have in common: who may be sent to, calls that find no engine, and own accounting."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from cli.simulate.contracts import Call, EngineView, Floor, Pushes
from controlplane.domain.catalog import Role

# llm-d's prefix-based decider of pairs, with the thresholds of its documentation (2026): a call is split when
# it has so long a prompt and the engine that is to answer it does not hold so much of it.
PAIR_PROMPT_TOKENS_MIN: Final = 1_024
PAIR_UNCACHED_TOKENS_MIN: Final = 512


class Placing(Pushes, ABC):
    """Pushes every call to an engine when it comes. Calls that find none wait for one to accept.

    A subclass says where: `choose` gets the engines that accept, never none of them. It may refuse the
    call itself and answer None. Where that engine only decodes, a prompt of which it holds little is
    computed by the prefill engine of its region with the fewest calls in flight.
    """

    name = "placing"

    def __init__(self) -> None:
        self._homeless: dict[str, Call] = {}
        self._prefills: tuple[EngineView, ...] = ()

    def begin(self, floor: Floor) -> None:
        super().begin(floor)
        self._prefills = tuple(view for view in floor.engines if view.spec.role is Role.PREFILL)

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
            prefill = self.prefill_for(call, engine)
            if prefill is None:
                self.floor.send(call, engine, self.priority(call))
            else:
                self.floor.send(call, engine, self.priority(call), prefill)

    def prefill_for(self, call: Call, engine: int) -> int | None:
        """Who computes the prompt for an engine that only decodes, None when that does so itself."""
        spec = self.floor.engines[engine].spec
        if not self._prefills or spec.role is not Role.DECODE:
            return None
        uncached = call.prompt_tokens - self.floor.cached_tokens(call, engine)
        if call.prompt_tokens < PAIR_PROMPT_TOKENS_MIN or uncached < PAIR_UNCACHED_TOKENS_MIN:
            return None
        able = [
            view
            for view in self._prefills
            if view.spec.region == spec.region and self.floor.can_prefill(call, view.index)
        ]
        return least_loaded(able).index if able else None

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
        is_split = self.prefill_for(call, engine) is not None
        self.ledger.sent(call, engine, 1 if is_split else self.uncached(call, engine))

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
