"""Pictures and their filters: :mod:`.bench` measures filters of images."""
