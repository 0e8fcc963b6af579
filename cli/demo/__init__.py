"""`headway demo`: a local fleet under a seeded load, one engine killed, and the bill at the end."""
