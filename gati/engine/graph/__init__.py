"""The early-exit network as a graph for other runtimes."""
