"""Engines on tierd: vLLM, SGLang, Hugging Face transformers, LMCache, and events for routers.

Purpose: what each engine's own interface asks for, over `tierd.client`. Non-purpose: anything of the daemon's. Invariants: no engine is imported with
this package, only by the module that is for it and only when the engine itself loads that; an engine is never a dependency; whatever tierd does, an
engine sees a smaller hit, never an exception and never a wait without a deadline.
"""
