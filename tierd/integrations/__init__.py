"""Engines on tierd: vLLM, SGLang, Hugging Face transformers, LMCache, and events for routers.

Each engine's own interface, built on `tierd.client`; no code of the daemon is here. An engine is
never a dependency. Only the module made for an engine imports it, when that engine loads the
module. A failure of tierd shrinks an engine's hit. It never raises, and every wait has a deadline.
"""
