"""Branch coverage of the services and decoders, for each module.

Call: `python -m tools.branches build/coverage.json`. Purpose: no module that reads messages or
stored bytes falls below the limit unnoticed, as it could in an average. Non-purpose: measuring;
`make coverage` does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LIMIT = 0.95
SERVICES = "admin call_errors caller credits former grants guard identity instance peers rpc scrubbing service session_connection session_requests session_socket sessions streams wire"
DECODERS = "catalogue checksum heads holds journal marks recovery slots snapshot stored_index"
CLIENT = "protocol remote replies segments session session_socket"
MODULES = [
    f"tierd/{folder}/{name}.py"
    for folder, names in (("server", SERVICES), ("tiers", DECODERS), ("client", CLIENT))
    for name in names.split()
]


def share(summary: dict[str, Any]) -> float:
    """The share of the branches that ran; 1.0 if there are none."""
    return summary["covered_branches"] / summary["num_branches"] if summary["num_branches"] else 1.0


def main(path: str) -> int:
    """Prints a row for each module. Returns 1 if a module is below the limit or was not measured."""
    files = json.loads(Path(path).read_text())["files"]
    below = 0
    for module in MODULES:
        found = files.get(module)
        reached = share(found["summary"]) if found else 0.0
        below += reached < LIMIT
        missed = ", ".join(f"{start}->{end}" for start, end in found["missing_branches"]) if found else "not measured"
        print(f"{'LOW ' if reached < LIMIT else '    '}{module:34}{reached:7.1%}  {missed}")
    return int(below > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
