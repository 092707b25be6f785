"""The daemon's outside: the session socket, gRPC, and the life of the process."""
