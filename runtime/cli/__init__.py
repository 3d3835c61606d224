"""The command line of the runtime: one file per command, parsed by click; the packages that they call do the work."""
