"""How many workflows may live in a pool at once: a safety limit on their contexts against its KV memory.

Contexts may exceed the memory by a factor, since most workflows pause most of the time. When tokens that
should have been reusable are missed, the pool is thrashing and the factor shrinks by a part; while they
are found it grows by a step. Bounded engines and deadline order are how load is controlled; this
limit is meant to bind only when they are not enough. No clock.
"""

from dataclasses import dataclass, field
from typing import Final

from controlplane.domain.ids import WorkflowId

FACTOR_MAX: Final = 8.0
# Below this not even the contexts that fit in memory would be let in.
FACTOR_MIN: Final = 1.0
FACTOR_STEP: Final = 0.1
FACTOR_SHRINK: Final = 0.8
# A fifth of what should have been reusable is lost by chance and by restarts as well.
MISS_RATIO_MAX: Final = 0.2
# One verdict for so many tokens that should have been reusable, as a part of the pool's memory.
VERDICT_RATIO: Final = 0.25
VERDICT_TOKENS_MIN: Final = 10_000
WORKFLOWS_MAX: Final = 100_000


@dataclass(slots=True)
class _Pool:
    """`contexts` are tokens by live workflow; the counts below them run until the next verdict."""

    kv_tokens: int = 0
    factor: float = FACTOR_MAX
    live_tokens: int = 0
    contexts: dict[WorkflowId, int] = field(default_factory=dict)
    reusable: int = 0
    missed: int = 0


class WorkingSets:
    """One limit for each pool, that is each model. Pools of unknown capacity have none."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def use_capacity(self, pool: str, kv_tokens: int) -> None:
        """KV tokens that the pool's engines hold together."""
        self._pool(pool).kv_tokens = kv_tokens

    def may_begin(self, pool: str, context_tokens: int) -> bool:
        """Whether a workflow of this size may begin; the first one always may."""
        state = self._pools.get(pool)
        if state is None or state.kv_tokens <= 0 or not state.contexts:
            return True
        return state.live_tokens + context_tokens <= state.factor * state.kv_tokens

    def begun(self, pool: str, workflow: WorkflowId, context_tokens: int) -> None:
        """A workflow lives in the pool from now on; of one that does, the context is this large."""
        state = self._pool(pool)
        if workflow not in state.contexts and len(state.contexts) >= WORKFLOWS_MAX:
            # Whoever began first and was never said to have ended is forgotten.
            self.ended(pool, next(iter(state.contexts)))
        state.live_tokens += context_tokens - state.contexts.get(workflow, 0)
        state.contexts[workflow] = context_tokens

    def grew(self, pool: str, workflow: WorkflowId, context_tokens: int) -> None:
        """A step made the context this large; contexts do not shrink. Unknown workflows stay unknown."""
        state = self._pools.get(pool)
        if state is not None and context_tokens > state.contexts.get(workflow, context_tokens):
            self.begun(pool, workflow, context_tokens)

    def ended(self, pool: str, workflow: WorkflowId) -> None:
        state = self._pools.get(pool)
        if state is not None:
            state.live_tokens -= state.contexts.pop(workflow, 0)

    def observed(self, pool: str, reusable_tokens: int, reused_tokens: int) -> None:
        """A step found `reused_tokens` of the `reusable_tokens` that an engine had computed before."""
        state = self._pool(pool)
        state.reusable += max(0, reusable_tokens)
        state.missed += max(0, reusable_tokens - max(0, reused_tokens))
        if state.reusable < max(VERDICT_TOKENS_MIN, VERDICT_RATIO * state.kv_tokens):
            return
        if state.missed > MISS_RATIO_MAX * state.reusable:
            state.factor = max(FACTOR_MIN, state.factor * FACTOR_SHRINK)
        else:
            state.factor = min(FACTOR_MAX, state.factor + FACTOR_STEP)
        state.reusable = state.missed = 0

    def factor(self, pool: str) -> float:
        """How far live contexts may exceed the pool's memory at present."""
        state = self._pools.get(pool)
        return FACTOR_MAX if state is None else state.factor

    def live_tokens(self, pool: str) -> int:
        state = self._pools.get(pool)
        return 0 if state is None else state.live_tokens

    def _pool(self, pool: str) -> _Pool:
        state = self._pools.get(pool)
        if state is None:
            state = self._pools[pool] = _Pool()
        return state
