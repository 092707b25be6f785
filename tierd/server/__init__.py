"""The daemon's outer parts: the session socket, gRPC, and the life of the process."""
