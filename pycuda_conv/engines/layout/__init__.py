"""Launches that change how arrays lie, or their types."""
