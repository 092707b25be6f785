"""The parts of `tierctl top`: answers, keys, view, rows, frame."""
