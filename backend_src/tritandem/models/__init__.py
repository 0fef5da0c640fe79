"""Where a model's folder comes from: a path, a GGUF file, a packaged model by name, or a hub."""

from .resolve import resolve_model

__all__ = ["resolve_model"]
