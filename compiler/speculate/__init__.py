"""What the compiler decides about speculation: the tree of guesses, from measured acceptance and the cost of a step."""
