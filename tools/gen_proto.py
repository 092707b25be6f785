"""Generates the stubs in tierd/_proto from proto/: `python tools/gen_proto.py [TARGET]`.

The generator replaces the proto package's path in the generated imports with the stubs' own. So
`proto/tierd/v1` and the Python package `tierd` do not collide.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "proto").glob("tierd/v1/*.proto"))


def generate(target: Path) -> list[Path]:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py flat into target and returns them."""
    target.mkdir(parents=True, exist_ok=True)
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'proto'}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *(str(source) for source in SOURCES),
        ]
    )
    if code:
        raise SystemExit(f"protoc: exit status {code}")
    written = []
    for path in sorted((target / "tierd" / "v1").iterdir()):
        text = re.sub(r"from tierd\.v1 import", "from tierd._proto import", path.read_text())
        (target / path.name).write_text(text)
        written.append(target / path.name)
        path.unlink()
    (target / "tierd" / "v1").rmdir()
    (target / "tierd").rmdir()
    return written


if __name__ == "__main__":
    for stub in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tierd" / "_proto"):
        print(stub)
