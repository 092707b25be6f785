"""The GPU process: device memory and copies, in a process of its own that the daemon may kill."""
