"""Names for namespaces: people know models, but blocks and events have namespace ids.

`Models` maps the id of a namespace, of any rank, to a model's name. It asks no daemon.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tierd._proto import admin_pb2 as pb


class Models:
    """The models of a daemon's namespaces."""

    def __init__(self, namespaces: Iterable[pb.NamespaceInfo]) -> None:
        self._names: dict[int, str] = {}
        for one in namespaces:
            ranks = int(spec_of(one.text).get("rank_count", 1))
            for rank in range(ranks):
                self._names[one.id + rank] = one.model + (f" rank {rank}" if ranks > 1 else "")

    def __contains__(self, namespace: int) -> bool:
        return namespace in self._names

    def name(self, namespace: int) -> str:
        """The model, with the rank if there are several; the id if the model is unknown."""
        return self._names.get(namespace, f"namespace {namespace}")

    def short_name(self, namespace: int) -> str:
        """The model without the directories above it."""
        return self.name(namespace).rstrip("/").rpartition("/")[2]


def spec_of(text: str) -> dict[str, int | str]:
    """The spec in a namespace's canonical JSON; empty if a newer daemon uses another format."""
    try:
        whole = json.loads(text)
    except ValueError:
        return {}
    spec = whole.get("spec", whole) if isinstance(whole, dict) else {}
    return spec if isinstance(spec, dict) else {}
