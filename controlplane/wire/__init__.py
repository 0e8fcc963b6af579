"""Words of the OpenAI wire format. Knows nothing of where a body came from or goes to."""
