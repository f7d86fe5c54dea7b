"""The eviction service: what a full prefix cache forgets, learned away from the engines that have one.

`gati evict serve DIR` answers `POST /v1/continue`, and runs `python -m services.eviction`, which reads what
engines log of their accesses, fits predictors to it, and publishes those that would have missed less.
Engines only ever write and read files in the folder: none of them waits for this service.
"""
