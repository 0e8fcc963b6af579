"""What operators decide: who may use what, at which weight and within which limits. Data, not code."""
