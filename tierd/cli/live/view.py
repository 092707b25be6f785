"""State that the keys of `tierctl top` set: focus, sort keys, filters, scrolling. It draws nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.cli.tree import SORTS

PANES = ("tiers", "sessions", "tree", "rates")
PANE_SORTS: dict[str, tuple[str, ...]] = {
    "tiers": ("order", "fill", "hits", "traffic"),
    "sessions": ("bytes held", "leases", "age", "name"),
    "tree": SORTS,
    "rates": ("rate", "name"),
}
HELP = """
1 2 3 4, Tab    focus a pane; it gets the most lines
up down, k j    scroll it
s               sort it by the next key
/               filter it: only rows with the text; Enter keeps it, Esc drops it
p               pause and go on
?               this help
q, Ctrl-C       quit

hits now        share that the tier served of the tokens asked for since the
                last frame; hits: since the daemon's start
tree            cached prefixes, and what `tierctl tree` shows of each
ceiling         expected hit ratio of the last hour with so much memory and disk"""


@dataclass(slots=True)
class View:
    """State that keys set. sorts: indices into PANE_SORTS. is_typing: keys go to the focused filter."""

    focus: int = 0
    sorts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PANES, 0))
    filters: dict[str, str] = field(default_factory=lambda: dict.fromkeys(PANES, ""))
    offsets: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PANES, 0))
    is_typing: bool = False
    is_paused: bool = False
    is_helping: bool = False

    @property
    def pane(self) -> str:
        """The focused pane."""
        return PANES[self.focus]

    def sort_of(self, pane: str) -> str:
        """The key that the pane is sorted by."""
        return PANE_SORTS[pane][self.sorts[pane]]

    def press(self, key: str) -> bool:
        """Takes one key, named as in keys.py. False: it ends the program."""
        if self.is_typing:
            self._type(key)
        elif key in ("q", "Q"):
            return False
        elif key in ("tab", "backtab"):
            self.focus = (self.focus + (1 if key == "tab" else -1)) % len(PANES)
        elif key.isdecimal() and 0 < int(key) <= len(PANES):
            self.focus = int(key) - 1
        elif key in ("up", "k", "down", "j"):
            self.offsets[self.pane] = max(0, self.offsets[self.pane] + (1 if key in ("down", "j") else -1))
        elif key == "s":
            self.sorts[self.pane] = (self.sorts[self.pane] + 1) % len(PANE_SORTS[self.pane])
        elif key == "p":
            self.is_paused = not self.is_paused
        elif key == "/":
            self.is_typing = True
        elif key == "?":
            self.is_helping = not self.is_helping
        elif key == "escape":
            self.is_helping, self.filters[self.pane] = False, ""
        return True

    def _type(self, key: str) -> None:
        text = self.filters[self.pane]
        if key in ("enter", "escape"):
            self.is_typing = False
        if key in ("erase", "escape"):
            text = "" if key == "escape" else text[:-1]
        elif len(key) == 1 and key.isprintable():
            text += key
        self.filters[self.pane], self.offsets[self.pane] = text, 0
