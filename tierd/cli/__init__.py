"""The command line: `tierd` runs a daemon, `tierctl` uses one, both through the client."""

import os

# The learner's matrices are small: threads would wait longer than work. numpy reads it on import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Without it Pydantic searches all installed packages for plugins, when the first model is made.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
