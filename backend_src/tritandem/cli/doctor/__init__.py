"""`tritandem doctor`: what limits a running server, or whether one could start here."""

from .command import add_parser

__all__ = ["add_parser"]
