"""A router's view of tierd, from KV events: which media hold which blocks.

`python deploy/examples/events/listen.py ADDRESS REPLAY BLOCKS` ends once it knows so many blocks.
ADDRESS and REPLAY: `bind` and `replay_bind` of the daemon's [events].
"""

from __future__ import annotations

import sys

from tierd.integrations.events import Subscriber, Whereabouts


def main(address: str, replay: str, blocks: int) -> None:
    """Follows the events, beginning with those that the daemon has kept."""
    known = Whereabouts()
    with Subscriber(address, replay) as subscriber:
        messages = subscriber.catch_up()
        while len(known.media) < blocks:
            for message in messages:
                known.apply(message.batch.events)
            messages = subscriber.poll(1.0)
    for block, media in known.media.items():
        print(f"block {block:016x}: {', '.join(sorted(media))}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
