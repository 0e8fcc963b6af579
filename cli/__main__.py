"""`python -m cli` is the command `headway`: how `headway up` starts its children."""

from cli.main import main

main()
