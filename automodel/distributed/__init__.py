"""Processes and devices: what the launcher says, and the recipe's `distributed` and `dist_env` sections."""
