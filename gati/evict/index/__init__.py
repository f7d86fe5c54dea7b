"""What a cache holds: a prefix tree of runs."""
