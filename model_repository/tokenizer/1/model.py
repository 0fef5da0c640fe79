"""Plug: Triton's model `tokenizer` is `tritandem.triton_io.tokenizer_plug`."""

from tritandem.config import config_from_environment, model_folder_from_environment
from tritandem.tokenizer import load_tokenizer
from tritandem.triton_io.tokenizer_plug import TokenizerPlug


class TritonPythonModel:
    def initialize(self, args):
        config = config_from_environment().tokenizer
        self._plug = TokenizerPlug(load_tokenizer(model_folder_from_environment(), config))

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
