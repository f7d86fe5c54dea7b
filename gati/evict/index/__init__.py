"""The index of a cache: a prefix tree of runs."""
