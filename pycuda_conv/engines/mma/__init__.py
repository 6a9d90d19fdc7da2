"""Engines on tensor cores by mma.sync and cp.async: Ampere and later."""
