"""From a program and a goal to certified plans."""
