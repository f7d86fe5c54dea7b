"""Traces of requests: reading and checking them, and the next use of each block."""
