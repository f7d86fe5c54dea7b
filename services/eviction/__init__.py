"""The eviction service: learns eviction predictors for the prefix caches of engines, in separate processes.

`gati evict serve DIR` answers `POST /v1/continue`, and runs `python -m services.eviction`, which reads the
access logs of engines, fits predictors to them, and publishes predictors that would have missed fewer blocks.
Engines only write and read files in the folder, so they never wait for this service.
"""
