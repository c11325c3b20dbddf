"""Checkpoints that survive a kill: written whole, flushed to the disk, and only then pointed at."""
