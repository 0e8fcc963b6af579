"""The shell around the decision core: holds live state, commits decisions, runs the loops."""
