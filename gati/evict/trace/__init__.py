"""Traces of requests: reading them, checking them, and what lies ahead in them."""
