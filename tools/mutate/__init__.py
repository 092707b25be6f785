"""Removes the code's checks, one at a time, and shows which test fails."""
