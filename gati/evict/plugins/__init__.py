"""Gati's policies as plug-ins: for vLLM's CPU tier, SGLang's radix cache, and LMCache's CPU cache."""
