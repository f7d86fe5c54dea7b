"""Measuring Gati on inputs it has not seen: evaluate, certify, bench, and the report about it."""
