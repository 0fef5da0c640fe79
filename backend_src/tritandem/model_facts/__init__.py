"""What a model's files say, read without torch or transformers: the one answer for every room."""

from pathlib import Path

from .folder import ModelFolder, read_folder
from .quantization import read_quantization, stored_layers
from .token_ids import check_token_ids, check_vocabulary, read_vocabulary
from .weight_files import read_weights

__all__ = ["ModelFolder", "check_folder", "read_folder"]


def check_folder(path: Path, weights: bool = True) -> None:
    """Refuse a folder whose files contradict one another. Raises ConfigError naming file and field."""
    folder = read_folder(path)
    check_token_ids(folder)
    if (vocabulary := read_vocabulary(path)) is not None:
        check_vocabulary(folder, vocabulary)
    if not weights:
        return
    held, quantization = read_weights(path), read_quantization(folder)
    if held is not None and quantization is not None:
        stored_layers(held, quantization, str(path))
