"""Engines on Hopper's tensor cores: wgmma and TMA."""
