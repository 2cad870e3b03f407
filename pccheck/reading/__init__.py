"""Everything that reads: records, manifests, payloads, the newest checkpoint that verifies."""
