"""A user's state as a typed tree, leaves, a byte space and a manifest, and back."""
