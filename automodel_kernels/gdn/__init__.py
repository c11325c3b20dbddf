"""Gated DeltaNet: the reference, one file per stage of the kernels, and the public operators."""
