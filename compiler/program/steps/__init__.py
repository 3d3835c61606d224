"""One frozen struct per lowered op: its operands by name, and every compile-time fact that the operands do not
carry."""
