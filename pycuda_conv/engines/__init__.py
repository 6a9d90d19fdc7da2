"""Kernel families. Each module says what it supports, which configurations it has and which launches they make."""
