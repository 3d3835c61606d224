"""Passes that divide a model among ranks."""
