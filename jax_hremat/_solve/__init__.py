"""The one place that calls the solver."""
