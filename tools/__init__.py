"""Programs for developers and for building kernels. As a package, this folder takes precedence over
any other package `tools`."""
