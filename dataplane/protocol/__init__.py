"""Messages and subjects between agents and control plane: all that the control plane knows of the data plane."""
