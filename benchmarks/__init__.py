"""Benchmarks of Gati against the alternatives; run as `python -m benchmarks.NAME`."""
