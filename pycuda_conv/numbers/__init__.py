"""Convolutions of arrays whose numbers are complex, or of which some are missing: composed of convolutions of real numbers."""
