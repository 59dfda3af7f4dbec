"""The program: traced, as a graph, with regions put into it, and what it then computes."""
