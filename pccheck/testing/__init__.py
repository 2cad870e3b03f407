"""Shipped test tools: faulty media, the crash explorer, conformance checks for backends of your own."""
