"""The mutations, as data: the old text, the new text, and the tests that should fail.

Purpose: one row for each check without which a client could read wrong bytes, or lose promised
ones. A text is in its file exactly once.
"""

from __future__ import annotations

from tools.mutate.copied import COPIED
from tools.mutate.served import SERVED
from tools.mutate.stored import STORED

MUTATIONS = (*STORED, *SERVED, *COPIED)
