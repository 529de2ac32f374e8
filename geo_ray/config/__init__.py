"""Configuration: a YAML file becomes a typed, checked, frozen tree."""
