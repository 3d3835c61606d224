"""GGUF files as a source of models: the container, the configuration, the weights and the tokenizer."""
