"""The version of both packages, readable without importing them."""

__version__ = "0.1.0"
