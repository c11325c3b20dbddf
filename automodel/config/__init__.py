"""Configuration: YAML recipes, typed scalars, environment placeholders, targets, overrides and section schemas."""
