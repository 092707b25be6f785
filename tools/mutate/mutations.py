"""The mutations, as data: which text goes, what comes in its place, which tests should notice.

Purpose: one row per check whose loss would show somebody wrong bytes, or lose what was promised to be kept. A text stands in its file exactly once.
"""

from __future__ import annotations

from tools.mutate.copied import COPIED
from tools.mutate.served import SERVED
from tools.mutate.stored import STORED

MUTATIONS = (*STORED, *SERVED, *COPIED)
