"""tierd for one loaded model: find, load and save a sequence.

It combines an EngineStore with the model's namespace; K and V in this process are in cache.py. Once
it is made, only a wrong call raises and nothing outlasts its timeout: a failure is a smaller
number. The weights are those of when it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.client import Group, NamespaceSpec, PutGroup
from tierd.client.match import Match, claim
from tierd.core.formats.model import ROOT
from tierd.errors import TierdError, Unsupported
from tierd.integrations.pieces import Pieces
from tierd.integrations.store import EngineStore
from tierd.integrations.transformers.identity import check_supported, facts_of, shapes_of, spec_of
from tierd.integrations.transformers.options import StoreOptions
from tierd.integrations.transformers.rows import padding_of
from tierd.worker.backend import Backend
from tierd.worker.coded_pages import CodedPages
from tierd.worker.pages import PageShape
from tierd.worker.tierd_pages import TierdOptions, TierdPages

Tokens = NDArray[np.int64]


class TierdStore:
    """TierdStore(model, target=..., tokens_per_block=...): see StoreOptions. A context manager;
    threads may share it.

    Make another one after changes of weights. Raises Unsupported for a model that tierd cannot
    store, ConfigError for a wrong option, InvalidArgument as weights_digest.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        check_supported(model)
        self.options = StoreOptions.read(options, where="TierdStore")
        self.shapes = shapes_of(model)
        self.padding = padding_of(model)
        self.attention = str(model.config._attn_implementation)
        self.engine = EngineStore(self.options, facts_of(model, self.shapes, self.options))
        self.spec = self._spec_of(model)
        self._opened = self.engine.open(self.spec)

    def _spec_of(self, model: Any) -> NamespaceSpec:
        """The namespace, with the option's codec. Raises ConfigError, InvalidArgument."""
        try:
            spec = spec_of(model, self.shapes, self.options)
            return self.engine.codings.spec(spec, spec.geometry)
        except TierdError:
            self.engine.close()
            raise

    @cached_property
    def pages(self) -> TierdPages:
        """Pages written and read in place, by one thread. Raises Unsupported if layers differ."""
        if not self.spec.geometry.layers:
            raise Unsupported("PagedTierdCache: the model's layers have K and V of different shapes; use TierdCache")
        shape = PageShape(self.spec.geometry, self.options.tokens_per_block, Backend("torch"))
        options = TierdOptions(keeps_copies=True, advisor=False)  # transformers reports no passes
        coded = self.engine.codings.of(self.spec)
        if coded is not None:
            return CodedPages(self.engine.client, self.spec, shape=shape, coding=coded.coding, options=options)
        return TierdPages(self.engine.client, self.spec, shape=shape, options=options)

    def find(self, tokens: Tokens) -> int:
        """Leading tokens worth loading: whole blocks; at least one token remains to compute."""
        hashes = self._hash(tokens)
        found = self.engine.lookup([Group(self._opened, hashes)]).tokens if len(hashes) else 0
        match = Match(found, computed=0, prompt=len(tokens))
        return claim(match, tokens_per_block=self.options.tokens_per_block, least_tokens=self.options.least_load_tokens)

    def load(self, tokens: Tokens, targets: Sequence[Pieces]) -> int:
        """Copies the first len(targets) blocks; returns how many leading tokens were loaded."""
        hashes, done = self._hash(tokens)[: len(targets)], 0
        while done < len(hashes):  # parts, since the near tier may not hold all at once
            good = self.engine.load([Group(self._opened, hashes[done:])], [targets[done:]]).good[0]
            if not good:
                break
            done += good
        return done * self.options.tokens_per_block

    def save(self, tokens: Tokens, pieces: Callable[[int], Pieces]) -> int:
        """Stores whole blocks; returns the tokens stored now. Calls `pieces` only for blocks not yet stored."""
        hashes = self._hash(tokens)
        stored = (
            self.engine.lookup([Group(self._opened, hashes)]).tokens // self.options.tokens_per_block
            if len(hashes)
            else 0
        )
        rest = hashes[stored:]
        parent = hashes[stored - 1].tobytes() if stored else ROOT
        group = PutGroup(self._opened, rest, parent=parent, position=stored)
        stored += self.engine.save(group, [pieces(i) for i in range(stored, len(hashes))]) if len(rest) else 0
        return stored * self.options.tokens_per_block

    def close(self) -> None:
        """Ends the session with the daemon."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _: object) -> Self:
        """A copied cache has the same store; transformers' guides copy caches to use a prompt twice."""
        return self

    def _hash(self, tokens: Tokens) -> NDArray[np.uint8]:
        """Hashes of whole blocks; none while there is no daemon."""
        if not self._opened.is_open:
            self._opened = self.engine.open(self.spec)
        return self._opened.hash(tokens)
