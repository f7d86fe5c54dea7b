"""Online adaptation of learned caches: audits, retraining, memory, and the choice of the serving version."""
