"""The command line of the runtime: one file per command, read by click; what they do is in the rooms that they call."""
