"""What a tenant manages with its own key."""
