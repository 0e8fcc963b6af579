"""Alembic's revisions of the schema. Never imports the tables: a revision stays what it was."""
