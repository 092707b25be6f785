"""The command line: `tierd` runs a daemon, `tierctl` talks to one. Everything here reaches the daemon through the client."""
