"""The release (floor 0); pyproject.toml reads it from here."""

__version__ = "0.1.0"
