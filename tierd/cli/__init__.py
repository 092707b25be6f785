"""The command line: `tierd` runs a daemon, `tierctl` talks to one. Everything here reaches the daemon through the client."""

import os

# The learner multiplies small matrices: threads for it wait for one another longer than they work. Read when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
