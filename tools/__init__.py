"""Programs for developers, and what builds kernels; a package, so that another one of that name, which an environment may have, does not take its place."""
