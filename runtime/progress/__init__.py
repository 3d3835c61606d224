"""How far work is: an estimate that does not jump, and the displays that show it."""
