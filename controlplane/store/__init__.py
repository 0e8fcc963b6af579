"""PostgreSQL, the one durable truth. Rows never leave this package; domain values do."""
