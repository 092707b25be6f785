"""The daemon on a virtual clock, with a seed for every choice, over memory and a disk that fail: `python -m tierd.testing.sim --help`."""
