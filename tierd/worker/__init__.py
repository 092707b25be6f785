"""The reference inference worker: a Llama-type model whose keys and values live in tierd's pages."""
