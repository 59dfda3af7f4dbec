"""Mixed-integer programs that choose the plan, and the one place that calls the solver."""
