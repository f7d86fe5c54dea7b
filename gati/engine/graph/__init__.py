"""The early-exit network as a graph that other engines run."""
