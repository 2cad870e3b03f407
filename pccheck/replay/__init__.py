"""Policies of checkpointing over a trace of failures: in simulation (floor 0), with real processes (floor 4)."""
