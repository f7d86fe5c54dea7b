"""Costs of a network, a segment or a lookup on a backend: measured, bounded from below, and stored."""
