"""Predicting when blocks are used next."""
