"""Costs of a network, a segment or a lookup on a backend: measurements, lower bounds and storage."""
