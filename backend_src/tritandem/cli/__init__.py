"""The `tritandem` command: one subcommand a file, on top of every other room."""

from .main import main

__all__ = ["main"]
