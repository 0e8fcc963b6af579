"""`python -m dataplane.agent`."""

from dataplane.agent.main import main

main()
