"""What the next training step depends on, as one object; and loaders that know where they are in the data."""
