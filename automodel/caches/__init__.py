"""Folders and files that outlive a run and are shared between runs."""
