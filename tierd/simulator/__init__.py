"""The simulator: traces through the core, many sizes and policies at once."""
