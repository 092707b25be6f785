"""Tests, and what they share; a package, so that another one of that name, which some engine's dependency installs, does not take its place."""
