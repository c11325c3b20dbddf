"""What a run shows and leaves behind: metrics rows, timings, terminal progress, the report page, the environment."""
