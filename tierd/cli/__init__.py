"""The command line: `tierd` runs a daemon, `tierctl` uses one, both through the client."""

import os

# The learner's matrices are small: threads would wait longer than work. Read by numpy's import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Else Pydantic searches all installed packages for plugins at startup. Read with the first model.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
