"""PostgreSQL and NATS as child processes, for those who give no URL of their own.

Knows nothing of tables or messages.
"""
