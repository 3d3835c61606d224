"""Progress of work: an estimate that changes smoothly, and the displays that show it."""
