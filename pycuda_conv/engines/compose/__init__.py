"""Engines that give a part of their work to another engine."""
