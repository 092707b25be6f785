"""A source of pages that stores and reuses in this process, as the daemon's would, and small models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.model import Llama
from tierd.worker.pages import Held, LocalPages, Page, PageShape
from tierd.worker.spec import LlamaSpec

TINY = LlamaSpec(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    max_positions=512,
    tied=True,
)


class StoringPages(LocalPages):
    """LocalPages that keep committed blocks and return them again; at most `room` full blocks."""

    def __init__(self, shape: PageShape, room: int = 1000) -> None:
        super().__init__(shape)
        self.store: dict[bytes, Page] = {}
        self.room = room
        self.mass: list[tuple[bytes, float]] = []

    @property
    def held(self) -> int:
        """Pages, private and named, that a block table holds."""
        return self.in_use + sum(page.holders > 1 for page in self.store.values())

    def name(self, tokens: Sequence[int], after: Page | None) -> bytes:
        """The block's hash in its chain."""
        return hashlib.sha256((after.hash if after else b"") + np.asarray(tokens, "<i8").tobytes()).digest()

    def acquire(self, tokens: Sequence[int], *, marks: Sequence[int] = (), by_layer: bool = False) -> Held:
        pages: list[Page] = []
        size = self.shape.tokens_per_block
        while (page := self._find(tokens[len(pages) * size : (len(pages) + 1) * size], pages, size)) is not None:
            pages.append(page)
        start = len(pages) * size
        tails = [self._find(tokens[start:mark], pages, mark - start) for mark in marks if start < mark < start + size]
        tail = next((t for t in reversed(tails) if t is not None), None)
        held = pages + ([tail] if tail else [])
        for page in held:
            page.holders += 1
        count = start + (tail.array.shape[2] if tail else 0)
        return Held(pages, tail, count, {"memory.0": count} if count else {})

    def _find(self, tokens: Sequence[int], before: list[Page], size: int) -> Page | None:
        return self.store.get(self.name(tokens, before[-1] if before else None)) if len(tokens) == size else None

    def commit(self, pages: Sequence[Page], tokens: Sequence[int], *, after: Page | None) -> list[Page]:
        given = list(pages)
        size = self.shape.tokens_per_block
        for i, page in enumerate(pages):
            if not page.is_private:
                after = page
                continue
            key = self.name(tokens[i * size : (i + 1) * size], after)
            if key in self.store:
                given[i] = self.store[key]
                given[i].holders += 1
                self.release([page])
            elif len(self.store) < self.room:
                self._store(page, key)
                self.in_use -= 1
            else:
                break
            after = given[i]
        return given

    def _store(self, page: Page, key: bytes) -> None:
        """Named pages have the store as one more holder, and are read-only as mapped ones are."""
        page.hash = key
        page.array.flags.writeable = False
        page.holders += 1
        self.store[key] = page

    def commit_tail(self, page: Page, tokens: Sequence[int], *, after: Page | None) -> bool:
        copy = Page(np.array(page.array[:, :, : len(tokens)]), holders=0)
        self._store(copy, self.name(tokens, after))
        return True

    def report_attention(self, pages: Sequence[Page], mass: Sequence[float]) -> None:
        self.mass += [(page.hash, m) for page, m in zip(pages, mass, strict=True)]

    def release(self, pages: Sequence[Page]) -> None:
        for page in pages:
            if page.is_private:
                super().release([page])
            else:
                assert page.holders > 1, "released more often than held"
                page.holders -= 1


@pytest.fixture(scope="session")
def model() -> Llama:
    """Random weights large enough that logits differ clearly."""
    return Llama(random_checkpoint(TINY, seed=3, scale=0.2))


@pytest.fixture
def shape() -> PageShape:
    """Pages of four tokens of the tiny model in float32."""
    return PageShape(TINY.geometry("float32"), 4, Backend())


@pytest.fixture
def new_source(shape: PageShape) -> Callable[..., StoringPages]:
    """Makes sources that store."""

    def make(*, room: int = 1000, dtype: str = "float32") -> StoringPages:
        return StoringPages(replace(shape, geometry=TINY.geometry(dtype)), room)

    return make
