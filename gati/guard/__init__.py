"""Keeping the promise while serving: audits, the detector, proofs, and the watch over each version."""
