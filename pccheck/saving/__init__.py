"""Saves under way: admitted, captured, committed in one order, reported."""
