"""Published statistics of what tenants ask, as the demo and the simulated world draw from them.

Coding: kv-cache-tester (Claude Code), 7,196 tasks of 49,334 calls. Sub-agents: the 9 of 355 of its sessions
that have any, with 38 of them in 18 of 110 tasks. Chat: Mooncake conversation trace, 8,124 sessions. Agents:
SWE-bench Verified, mini-SWE-agent. Spreads are lognormal through two published quantiles.
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
# In sessions that use sub-agents: tasks that hand work to any, their own calls, and those of other tasks.
SUBAGENT_TASK_RATIO: Final = 18 / 110
SUBAGENT_TASK_STEPS: Final = Spread.through(24, 54)
SUBAGENT_OTHER_STEPS: Final = Spread.through(9, 37)
# Tasks that do so 1, 2, 3 times; at which of their calls; and the times that it was to 1, 2, 3, 4 at once.
SUBAGENT_TIMES: Final = (14, 3, 1)
SUBAGENT_CALL: Final = Spread.through(2, 22)
SUBAGENT_WIDTHS: Final = (14, 4, 4, 1)
# Of sub-agents: their calls, the prompt that all begin with and what each is told, what a prompt adds to the
# one before, answers, the last one of them, and pauses.
SUBAGENT_STEPS: Final = Spread.through(11, 16)
SUBAGENT_PREFIX_TOKENS: Final = 9_700
SUBAGENT_TOLD_TOKENS: Final = 280
SUBAGENT_GROWTH_TOKENS: Final = Spread.through(2_538, 13_034)
SUBAGENT_OUTPUT_TOKENS: Final = Spread.through(224, 324)
SUBAGENT_REPORT_TOKENS: Final = Spread.through(3_023, 4_047)
SUBAGENT_GAP_S: Final = Spread.through(4.1, 32.1)
