"""One frozen struct per lowered op: its operands by name, and every compile-time fact that is not an operand's own."""
