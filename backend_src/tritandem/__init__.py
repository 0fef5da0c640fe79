"""Tritandem: CPU and GPU in tandem behind NVIDIA Triton. Rooms and tiers: docs/architecture.md."""

__version__ = "0.1.0"
