"""Further benchmarks of ``pycuda-conv bench``: first calls, host arrays, what calls cost the host, and loops of calls."""
