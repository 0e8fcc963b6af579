"""What a day's engine-hours cost when they are bought by a plan that was made from other days. Money in dollars.

The plan is that of `headway plan procure`, on the priced offers that ship. The day is then billed minute by
minute: what is reserved is paid all day, the rest is rented, as spot up to the part that the plan's rule lets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

import yaml

from cli.procurement import OFFERS
from controlplane.domain.ids import GpuTypeName
from controlplane.scheduler.planner.procure import (
    SPOT_RATIO_MAX,
    Offer,
    Purchase,
    Step,
    Term,
    failed_ratio,
    offers_of,
    procure,
    time_lost_ratio,
)

HOURS: Final = 24
MINUTES_PER_HOUR: Final = 60.0
MICRO_USD_PER_USD: Final = 1e6


@cache
def shipped_offers() -> tuple[Offer, ...]:
    return offers_of(yaml.safe_load(OFFERS.read_text()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bought:
    """A purchase and its last step. `gpus` are those of one engine."""

    purchase: Purchase
    step: Step
    gpu_type: GpuTypeName
    gpus: int

    def offer(self, term: Term) -> Offer | None:
        return next(
            (
                one
                for one in self.purchase.offers
                if one.gpu_type == self.gpu_type and one.term is term
            ),
            None,
        )

    @property
    def reserved_gpus(self) -> float:
        return sum(one.gpus_mean for one in self.step.bought if one.term is Term.RESERVED)

    @property
    def has_spot(self) -> bool:
        return any(one.term is Term.SPOT for one in self.step.bought)

    def document(self) -> dict[str, Any]:
        return {
            "planned_work": [round(work, 6) for work in self.purchase.work_per_s],
            "reserved_gpus": self.reserved_gpus,
            "has_spot": self.has_spot,
            "planned_saved_ratio": round(self.step.saved_ratio, 6),
            "offers": [asdict(offer) for offer in self.purchase.offers],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    usd: float
    on_demand_only_usd: float
    spot_failed_ratio: float


def plan_of(
    days: Sequence[Sequence[int]],
    gpu_type: GpuTypeName,
    gpus: int,
    offers: tuple[Offer, ...] | None = None,
) -> Bought:
    """The plan for days like these, given as engines that were on by the minute. Work is told in GPUs."""
    usable = tuple(one for one in (offers or shipped_offers()) if one.gpu_type == gpu_type)
    purchase = Purchase(
        work_per_s=tuple(gpus * mean for mean in _by_hour(days)),
        work_per_gpu_s={gpu_type: 1.0},
        offers=usable,
        gpus_per_node=gpus,
    )
    return Bought(purchase=purchase, step=procure(purchase)[-1], gpu_type=gpu_type, gpus=gpus)


def _by_hour(days: Sequence[Sequence[int]]) -> list[float]:
    """Mean engines of each of 24 equal parts of the days."""
    sums = [0.0] * HOURS
    counts = [0] * HOURS
    for minutes in days:
        for minute, engines in enumerate(minutes):
            part = minute * HOURS // len(minutes)
            sums[part] += engines
            counts[part] += 1
    return [total / max(1, count) for total, count in zip(sums, counts, strict=True)]


def day_bill(plan: Bought, engines_on_by_minute: Sequence[int]) -> Bill:
    """A day as it came. Spot is at most the part of the GPUs that are on that a plan may lend itself, and
    more of it is rented by what interruptions lose.
    """
    prices: Mapping[Term, float] = {
        term: offer.micro_usd_per_gpu_hour / MICRO_USD_PER_USD / MINUTES_PER_HOUR
        for term in Term
        if (offer := plan.offer(term)) is not None
    }
    spot = plan.offer(Term.SPOT) if plan.has_spot else None
    lost = 0.0 if spot is None else time_lost_ratio(plan.purchase, spot)
    fails = 0.0 if spot is None else failed_ratio(plan.purchase, spot)
    usd = only = failed = worked = 0.0
    for engines in engines_on_by_minute:
        on = float(engines * plan.gpus)
        only += on * prices[Term.ON_DEMAND]
        if plan.reserved_gpus:
            usd += plan.reserved_gpus * prices[Term.RESERVED]
        rest = max(0.0, on - plan.reserved_gpus)
        lent = 0.0
        if spot is not None:
            # Whole engines.
            lent = min(rest, SPOT_RATIO_MAX * on) // plan.gpus * plan.gpus
            usd += lent / (1.0 - lost) * prices[Term.SPOT]
        usd += (rest - lent) * prices[Term.ON_DEMAND]
        failed += lent * fails
        worked += on
    return Bill(
        usd=usd,
        on_demand_only_usd=only,
        spot_failed_ratio=failed / worked if worked else 0.0,
    )
