"""Published statistics of what tenants ask, as the demo and the simulated world draw from them.

Coding: kv-cache-tester (Claude Code), 7,196 tasks of 49,334 calls. Chat: Mooncake conversation trace, 8,124
sessions. Agents: SWE-bench Verified, mini-SWE-agent. Spreads are lognormal through two published quantiles.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Final

# Quantiles of the standard normal distribution.
Z90: Final = 1.2816
Z99: Final = 2.3263


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A lognormal distribution by its median and `sigma`, the deviation of its logarithm."""

    median: float
    sigma: float

    @classmethod
    def through(cls, p50: float, p90: float) -> "Spread":
        return cls(median=p50, sigma=math.log(p90 / p50) / Z90)

    def draw(self, random: Random) -> float:
        return self.median * math.exp(self.sigma * random.gauss(0.0, 1.0))


# Calls of an agent on one issue, with gpt-5.
AGENT_STEPS: Final = Spread(median=12, sigma=math.log(37 / 12) / Z99)
CODING_STEPS: Final = Spread.through(2, 17)
CODING_GROWTH_TOKENS: Final = Spread.through(646, 3_510)
CODING_OUTPUT_TOKENS: Final = Spread.through(216, 898)
CODING_GAP_S: Final = Spread.through(9, 74)
CHAT_INPUT_TOKENS: Final = Spread(median=6_909, sigma=math.sqrt(2 * math.log(12_035 / 6_909)))
CHAT_OUTPUT_TOKENS: Final = Spread.through(350, 597)
CHAT_GAP_S: Final = Spread.through(126, 486)
# Turns of a conversation that goes on after the first one.
CHAT_TURNS_MEAN: Final = 2.97
