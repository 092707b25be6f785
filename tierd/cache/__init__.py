"""The class `Cache`, with the only code that knows core, policies and mover.

`cache.py` has the engines' verbs, `operator.py` the operators'."""
