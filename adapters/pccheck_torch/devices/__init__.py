"""Memory that is not the host's: streams and events, CUDA, and a simulated device whose streams run late."""
