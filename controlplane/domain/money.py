"""Money is counted in whole micro-dollars; prices of tokens in micro-dollars per million tokens."""

MICRO_USD_PER_USD = 1_000_000
TOKENS_PER_PRICE_UNIT = 1_000_000


def token_cost_micro_usd(tokens: int, price_micro_usd_per_mtok: int) -> int:
    """Price of `tokens` tokens in micro-dollars, rounded up so that no use is free."""
    return -(-tokens * price_micro_usd_per_mtok // TOKENS_PER_PRICE_UNIT)


def usd(micro_usd: float) -> float:
    return micro_usd / MICRO_USD_PER_USD
