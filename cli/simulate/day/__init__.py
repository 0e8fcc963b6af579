"""A day of work in virtual time: what comes, who scales the fleet, and what the day costs."""
