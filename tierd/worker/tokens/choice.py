"""A request's token policy by name, and how many tokens it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierd.errors import InvalidArgument
from tierd.worker.tokens.chance import RandomPages, RandomTokens
from tierd.worker.tokens.h2o import H2O
from tierd.worker.tokens.policy import Budget, Place, TokenPolicy
from tierd.worker.tokens.quest import Quest
from tierd.worker.tokens.snapkv import SnapKV
from tierd.worker.tokens.streaming import Streaming

POLICIES: Mapping[str, Callable[[Budget, Place], TokenPolicy]] = {
    "h2o": H2O,
    "streaming": Streaming,
    "snapkv": SnapKV,
    "quest": Quest,
    "random": RandomTokens,
    "random-pages": RandomPages,
}
"""The policies by name. The last two are controls for measurements."""


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """name: one of POLICIES. keep: the fraction of the prompt; decoded tokens stay.

    tokens: a constant number instead, for "h2o" and "streaming" with decoded tokens; 0: the
    fraction.
    """

    name: str
    keep: float = 0.2
    tokens: int = 0

    def checked(self) -> TokenChoice:
        """The choice itself. Raises InvalidArgument for an unknown name or an impossible amount."""
        if self.name not in POLICIES:
            raise InvalidArgument(f"token_policy.name: {self.name!r} is unknown; choose from {', '.join(POLICIES)}")
        if not 0 < self.keep <= 1:
            raise InvalidArgument(
                f"token_policy.keep: {self.keep} is outside (0, 1]; give the fraction of tokens to keep, 1 for all"
            )
        if self.tokens and self.tokens < self.least:
            raise InvalidArgument(
                f"token_policy.tokens: {self.tokens} is below {self.least}, the least that {self.name} keeps; give "
                "more, or 0"
            )
        return self

    @property
    def least(self) -> int:
        """Tokens that the policy keeps at least."""
        return int(getattr(POLICIES[self.name], "least", 1))

    @property
    def is_endless(self) -> bool:
        """Whether a sequence may be longer than the model's positions: a window of constant length."""
        return self.name == "streaming" and self.tokens > 0

    def policy(self, place: Place) -> TokenPolicy:
        """A new policy of one layer."""
        return POLICIES[self.name](Budget(self.keep, self.tokens), place)
