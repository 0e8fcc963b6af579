"""Stands for a server that was there before the agent."""
