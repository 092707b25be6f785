"""The hash process: sums of pages that a client still writes, in a process of its own, whose interpreter lock is not the daemon's. `process.HashProcess` is the daemon's end of it."""
