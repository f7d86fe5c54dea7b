"""Measurements of Gati beside the plain alternatives; run as `python -m benchmarks.NAME`."""
