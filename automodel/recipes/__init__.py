"""Recipes: what a YAML file may say, and the jobs that it describes."""
