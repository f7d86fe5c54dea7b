"""Gati side by side with every other way to run the same base model here."""
