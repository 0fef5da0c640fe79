"""Tritandem: CPU and GPU in tandem behind NVIDIA Triton. The rooms and their tiers are drawn in README.md."""

__version__ = "0.1.0"
