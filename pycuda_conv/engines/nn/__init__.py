"""Launches of batch norms and poolings."""
