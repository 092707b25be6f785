"""The GPU process: device memory and its copies, in a process of its own that the daemon may kill. `process.GpuProcess` is the daemon's end of it."""
