"""Plug: Triton's model `tokenizer` is `tritandem.triton_io.plugs.tokenizer`.

Imports stand in `initialize`: Triton also loads this file once in a throw-away process to complete the configuration.
"""


class TritonPythonModel:
    def initialize(self, args):
        from tritandem.triton_io.plugs.start import start_tokenizer

        self._plug = start_tokenizer(args)

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
