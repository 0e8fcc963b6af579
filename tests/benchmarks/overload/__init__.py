"""The overload laboratory: a real cluster of simulated engines, callers that retry as the official SDK does,
and scenarios that say what overload, faults and an unfair tenant do to finished workflows.
"""
