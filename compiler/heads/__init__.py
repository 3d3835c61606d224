"""Medusa heads (Cai et al. 2024): their files, and their training on a frozen model."""
