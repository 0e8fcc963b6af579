"""Where a call runs: seven axes in one currency, the cheapest placement, and why it won. Pure."""
