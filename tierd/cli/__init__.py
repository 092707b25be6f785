"""The command line: `tierd` runs a daemon, `tierctl` talks to one. Everything here reaches the daemon through the client."""

import os

# The learner multiplies small matrices: threads for it wait for one another longer than they work. Read when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Pydantic would look for plugins of its own through all packages that are installed, before the daemon serves. Read with the first model.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
