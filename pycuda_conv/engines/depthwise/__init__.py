"""Engines for one channel a filter."""
