"""Money is counted in whole micro-dollars; prices of tokens in micro-dollars per million tokens."""

from math import isfinite

MICRO_USD_PER_USD = 1_000_000
TOKENS_PER_PRICE_UNIT = 1_000_000


def micro_usd(usd: float) -> int:
    """An amount that somebody gave in dollars, to the nearest micro-dollar.

    Raises ValueError when it is no amount, or so small that it would silently come to nothing.
    """
    if not isfinite(usd) or usd < 0:
        raise ValueError(f"{usd} is no amount of dollars")
    if 0 < usd < 1 / MICRO_USD_PER_USD:
        raise ValueError(
            f"${usd:.20f}".rstrip("0") + " is less than the least unit, $0.000001 (a micro-dollar)"
        )
    return round(usd * MICRO_USD_PER_USD)


def token_cost_micro_usd(tokens: int, price_micro_usd_per_mtok: int) -> int:
    """Price of `tokens` tokens in micro-dollars, rounded up so that no use is free."""
    return -(-tokens * price_micro_usd_per_mtok // TOKENS_PER_PRICE_UNIT)


def usd(micro_usd: float) -> float:
    return micro_usd / MICRO_USD_PER_USD
