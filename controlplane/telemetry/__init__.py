"""Counters, spans and log lines. Instrumentation is fed from outside and decides nothing."""
