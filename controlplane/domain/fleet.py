"""The fleet as one replica sees it: a mutable row per engine, owned by one task, and the one `fits` test.

Rows are plain slotted objects because the decision walks them for every request. Only
`runtime/fleet_state.py` writes to them; everything else reads.
"""

from typing import Final, NamedTuple
from zlib import crc32

from controlplane.domain.catalog import Role
from controlplane.domain.ids import EngineId, GpuTypeName, ModelName, NodeId, RegionName


class Rates(NamedTuple):
    """How fast an engine is, in milliseconds, as the decision reads it: products, corrected.

    `ttft_correction` and `tpot_correction` say how much longer than published a common call takes by
    these rates, for people to read: nothing multiplies by them.
    """

    prefill_base_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_token_sq: float
    decode_ms_base: float
    decode_ms_per_seq: float
    decode_ms_per_kv_token: float
    ttft_correction: float
    tpot_correction: float


# Values of the fields that reports and commitments change, in the order of `EngineRow.dynamic`.
Dynamic = tuple[
    bool, bool, bool, int, int, int, Rates, int, int, int, int, int, int, int, int, int, int, float,
    int, int, float, float, float, float, float, float, frozenset[str],
]  # fmt: skip

# `EngineRow.seats_bound` where nothing bounds the calls in flight but credits.
SEATS_UNBOUNDED: Final = 2**30


class EngineRow:
    """One engine: what it is, what it reports, what its agent lent this replica, what was spent of that.

    Rates are products that do not depend on the request: micro-dollars and milliseconds per token.
    Credits (`seats_lent`, `kv_tokens_lent`) may be spent until `credits_expire_ms`; `seats_taken` and
    `kv_tokens_taken` are this replica's calls in flight and may exceed what is lent after a shrink.
    `seats_bound` is the most calls that this replica keeps in flight there, for pace and for health, and
    `seats_over` how many more a preferred call may make them, where only pace is in the way;
    `attempts_expected` how often a call must be sent there until it succeeds, by its latest failures.
    `sleep_level` is 0 (awake), 1 (weights in host memory) or 2 (weights dropped, the process lives);
    `warm_up_ms` passes until a cold engine answers, and `calls_per_load` is how many calls are expected to
    share that. Flows are the workflows and calls that live there: one millisecond more for each of them
    is worth `flows_micro_usd_per_s` / 1000, and they make a step longer by `flows_ms_per_step` on average.
    `bid_micro_usd` is what a call that finds no seat there is worth, `offered_ratio` how full the engine
    is found by those that come. KV moves between engines of one `pair_key` that is not 0; by default that
    is the region. `rates` are `published` ones, corrected by what was measured there. `adapters` are
    loaded there, of which `adapter_slots` answer in one batch. `lacks` are features, by their names on the
    bus, that the engine does not have.
    """

    __slots__ = (
        "adapter_slots",
        "adapters",
        "attempts_expected",
        "bid_micro_usd",
        "calls_per_load",
        "context_tokens_max",
        "credits_epoch",
        "credits_expire_ms",
        "decode_ms_base",
        "decode_ms_per_kv_token",
        "decode_ms_per_seq",
        "engine_id",
        "flows_micro_usd_per_s",
        "flows_ms_per_step",
        "generation",
        "gpu_bit",
        "gpu_type",
        "index",
        "is_accepting",
        "is_suspect",
        "is_warm",
        "kv_price_micro_usd_per_token_s",
        "kv_tokens_capacity",
        "kv_tokens_lent",
        "kv_tokens_taken",
        "kv_tokens_used",
        "lacks",
        "load_ms",
        "micro_usd_per_ms",
        "model",
        "node_id",
        "offered_ratio",
        "pair_key",
        "prefill_base_ms",
        "prefill_ms_per_token",
        "prefill_ms_per_token_sq",
        "prefill_tokens_pending",
        "published",
        "rates",
        "region",
        "region_bit",
        "role",
        "running",
        "seats_bound",
        "seats_capacity",
        "seats_lent",
        "seats_over",
        "seats_taken",
        "sleep_level",
        "tie_seed",
        "tpot_correction",
        "ttft_correction",
        "waiting",
        "warm_up_ms",
    )  # fmt: skip

    def __init__(
        self,
        *,
        index: int,
        engine_id: EngineId,
        node_id: NodeId,
        region: RegionName,
        region_bit: int,
        gpu_type: GpuTypeName,
        gpu_bit: int,
        model: ModelName,
        role: Role,
        context_tokens_max: int,
        kv_tokens_capacity: int,
        seats_capacity: int,
        micro_usd_per_ms: float,
        prefill_base_ms: float,
        prefill_ms_per_token: float,
        prefill_ms_per_token_sq: float,
        decode_ms_base: float,
        decode_ms_per_seq: float,
        decode_ms_per_kv_token: float,
        kv_price_micro_usd_per_token_s: float,
        load_ms: int,
        pair_key: int = -1,
        adapter_slots: int = 0,
        lacks: frozenset[str] = frozenset(),
    ) -> None:
        self.index = index
        self.engine_id = engine_id
        self.node_id = node_id
        self.region = region
        self.region_bit = region_bit
        self.gpu_type = gpu_type
        self.gpu_bit = gpu_bit
        self.model = model
        self.role = role
        self.context_tokens_max = context_tokens_max
        self.kv_tokens_capacity = kv_tokens_capacity
        self.seats_capacity = seats_capacity
        self.micro_usd_per_ms = micro_usd_per_ms
        self.prefill_base_ms = prefill_base_ms
        self.prefill_ms_per_token = prefill_ms_per_token
        self.prefill_ms_per_token_sq = prefill_ms_per_token_sq
        self.decode_ms_base = decode_ms_base
        self.decode_ms_per_seq = decode_ms_per_seq
        self.decode_ms_per_kv_token = decode_ms_per_kv_token
        self.kv_price_micro_usd_per_token_s = kv_price_micro_usd_per_token_s
        self.load_ms = load_ms
        self.pair_key = region_bit if pair_key < 0 else pair_key
        self.adapter_slots = adapter_slots
        self.adapters: frozenset[str] = frozenset()
        self.lacks = lacks
        # 30 bits, so that mixing it with a request's stays in one machine word.
        self.tie_seed = crc32(engine_id.encode()) & 0x3FFF_FFFF
        self.generation = 0
        self.is_accepting = False
        self.is_suspect = False
        self.is_warm = False
        self.running = 0
        self.waiting = 0
        self.kv_tokens_used = 0
        self.ttft_correction = 1.0
        self.tpot_correction = 1.0
        self.rates = Rates(
            prefill_base_ms,
            prefill_ms_per_token,
            prefill_ms_per_token_sq,
            decode_ms_base,
            decode_ms_per_seq,
            decode_ms_per_kv_token,
            1.0,
            1.0,
        )
        self.published = self.rates
        self.seats_lent = 0
        self.kv_tokens_lent = 0
        self.credits_expire_ms = 0
        self.credits_epoch = 0
        self.seats_taken = 0
        self.kv_tokens_taken = 0
        self.prefill_tokens_pending = 0
        self.seats_bound = SEATS_UNBOUNDED
        self.seats_over = 0
        self.attempts_expected = 1.0
        self.sleep_level = 0
        self.warm_up_ms = load_ms
        self.calls_per_load = 1.0
        self.flows_micro_usd_per_s = 0.0
        self.flows_ms_per_step = 0.0
        self.bid_micro_usd = 0.0
        self.offered_ratio = 0.0

    def use_rates(self, rates: Rates) -> None:
        """Take corrected rates. The axes read plain members, so each is written out."""
        self.rates = rates
        self.prefill_base_ms = rates.prefill_base_ms
        self.prefill_ms_per_token = rates.prefill_ms_per_token
        self.prefill_ms_per_token_sq = rates.prefill_ms_per_token_sq
        self.decode_ms_base = rates.decode_ms_base
        self.decode_ms_per_seq = rates.decode_ms_per_seq
        self.decode_ms_per_kv_token = rates.decode_ms_per_kv_token
        self.ttft_correction = rates.ttft_correction
        self.tpot_correction = rates.tpot_correction

    def dynamic(self) -> Dynamic:
        """What reports and commitments change, as one value."""
        return (
            self.is_accepting,
            self.is_suspect,
            self.is_warm,
            self.running,
            self.waiting,
            self.kv_tokens_used,
            self.rates,
            self.seats_lent,
            self.kv_tokens_lent,
            self.credits_expire_ms,
            self.credits_epoch,
            self.seats_taken,
            self.kv_tokens_taken,
            self.prefill_tokens_pending,
            self.generation,
            self.seats_bound,
            self.seats_over,
            self.attempts_expected,
            self.sleep_level,
            self.warm_up_ms,
            self.calls_per_load,
            self.flows_micro_usd_per_s,
            self.flows_ms_per_step,
            self.bid_micro_usd,
            self.offered_ratio,
            self.kv_price_micro_usd_per_token_s,
            self.adapters,
        )

    def as_of(self, dynamic: Dynamic) -> "EngineRow":
        """A copy of this row that stands as it did when `dynamic` was taken."""
        row = EngineRow(
            index=self.index,
            engine_id=self.engine_id,
            node_id=self.node_id,
            region=self.region,
            region_bit=self.region_bit,
            gpu_type=self.gpu_type,
            gpu_bit=self.gpu_bit,
            model=self.model,
            role=self.role,
            context_tokens_max=self.context_tokens_max,
            kv_tokens_capacity=self.kv_tokens_capacity,
            seats_capacity=self.seats_capacity,
            micro_usd_per_ms=self.micro_usd_per_ms,
            prefill_base_ms=self.prefill_base_ms,
            prefill_ms_per_token=self.prefill_ms_per_token,
            prefill_ms_per_token_sq=self.prefill_ms_per_token_sq,
            decode_ms_base=self.decode_ms_base,
            decode_ms_per_seq=self.decode_ms_per_seq,
            decode_ms_per_kv_token=self.decode_ms_per_kv_token,
            kv_price_micro_usd_per_token_s=self.kv_price_micro_usd_per_token_s,
            load_ms=self.load_ms,
            pair_key=self.pair_key,
            adapter_slots=self.adapter_slots,
            lacks=self.lacks,
        )
        (
            row.is_accepting,
            row.is_suspect,
            row.is_warm,
            row.running,
            row.waiting,
            row.kv_tokens_used,
            rates,
            row.seats_lent,
            row.kv_tokens_lent,
            row.credits_expire_ms,
            row.credits_epoch,
            row.seats_taken,
            row.kv_tokens_taken,
            row.prefill_tokens_pending,
            row.generation,
            row.seats_bound,
            row.seats_over,
            row.attempts_expected,
            row.sleep_level,
            row.warm_up_ms,
            row.calls_per_load,
            row.flows_micro_usd_per_s,
            row.flows_ms_per_step,
            row.bid_micro_usd,
            row.offered_ratio,
            row.kv_price_micro_usd_per_token_s,
            row.adapters,
        ) = dynamic
        row.use_rates(rates)
        row.published = self.published
        return row


def fits(row: EngineRow, kv_tokens: int, now_ms: int, preferred: int = 0) -> bool:
    """The one fit test: the axis, the router and the commit all call it.

    `kv_tokens` is the most KV that the call can come to hold on this engine; `preferred` is 1 for a
    call that may exceed the engine's pace a little, else 0.
    """
    return (
        row.is_accepting
        and not row.is_suspect
        and now_ms < row.credits_expire_ms
        and row.seats_taken < row.seats_lent
        and row.seats_taken < row.seats_bound + row.seats_over * preferred
        and row.kv_tokens_taken + kv_tokens <= row.kv_tokens_lent
    )
