"""Frozen values that every other part speaks in. Knows nothing of HTTP, SQL, the bus or the clock."""
