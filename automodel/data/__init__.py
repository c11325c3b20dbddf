"""Datasets, tokenizers, collation and the data loader; each module is imported by its own name."""
