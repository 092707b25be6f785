"""Takes the checks out of the code, one at a time, and shows which test notices."""
