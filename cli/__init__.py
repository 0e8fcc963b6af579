"""The command line: one module per group of commands, and the local cluster of `headway up`."""
