"""The planner: which node serves which model, at what price, and what to change. Pure; solvers are imported lazily."""
