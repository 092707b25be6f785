"""`make gpu`: what only a GPU can tell. Each part is a process with a bound of its own; what is expected of each row was written down before any run."""
