"""Everything over HTTP that is not on the hot path: workflows of tenants, the operator API, health
and metrics.
"""
