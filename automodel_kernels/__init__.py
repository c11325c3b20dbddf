"""Triton kernels for training language models; each public operator is importable from here."""
