"""Tests, and code that they share. As a package, this folder takes precedence over any other
package `tests`, as an engine's dependency installs one."""
