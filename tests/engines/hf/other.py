"""Another process with the same model: `python -m tests.engines.hf.other TARGET KIND SEED` prints what it restored and said, as JSON."""

from __future__ import annotations

import json
import sys

from tests.engines.hf.models import llama, prompt
from tests.engines.hf.said import say


def main() -> None:
    """TARGET: the daemon's; KIND: TierdCache or PagedTierdCache; SEED: of the prompt."""
    from tierd.integrations import transformers as face

    target, kind, seed = sys.argv[1:]
    model = llama(attention="tierd_paged" if kind == "PagedTierdCache" else "sdpa")
    with face.TierdStore(model, target=target, timeout_s=60, lookup_timeout_s=60) as store:
        ids = prompt(int(seed))
        cache = getattr(face, kind).restore(store, ids)
        restored, answer = cache.restored, say(model, ids, cache=cache)
        said = {"restored": restored, "tokens": answer.tokens.tolist(), "logits": answer.logits.tolist()}
        print(json.dumps(said | {"saved": cache.save(answer.tokens)}))


if __name__ == "__main__":
    main()
