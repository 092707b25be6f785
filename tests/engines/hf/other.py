"""`python -m tests.engines.hf.other TARGET KIND SEED...`: a second process with the same model,
which prints its restored lengths and its answers as JSON."""

from __future__ import annotations

import json
import sys

from tests.engines.hf.models import llama, prompt
from tests.engines.hf.said import say


def main() -> None:
    """TARGET: the daemon's; KIND: TierdCache or PagedTierdCache; SEED: one for each prompt."""
    from tierd.integrations import transformers as face
    from tierd.integrations.transformers import TierdStore  # before the model: this import registers tierd_paged

    target, kind, *seeds = sys.argv[1:]
    model = llama(attention="tierd_paged" if kind == "PagedTierdCache" else "sdpa")
    with TierdStore(model, target=target, timeout_s=60, lookup_timeout_s=60) as store:
        said = []
        for seed in seeds:
            ids = prompt(int(seed))
            cache = getattr(face, kind).restore(store, ids)
            restored, answer = cache.restored, say(model, ids, cache=cache)
            words = {"restored": restored, "tokens": answer.tokens.tolist(), "logits": answer.logits.tolist()}
            said.append(words | {"saved": cache.save(answer.tokens)})
        print(json.dumps(said))


if __name__ == "__main__":
    main()
