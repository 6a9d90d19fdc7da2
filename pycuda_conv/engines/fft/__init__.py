"""The engine of Fourier transforms."""
