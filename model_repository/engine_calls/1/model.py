"""Plug: Triton's model `engine_calls` is `tritandem.triton_io.plugs.engine_calls`.

Imports stand in `initialize`: Triton also loads this file once in a throw-away process to complete the configuration.
"""


class TritonPythonModel:
    def initialize(self, args):
        from tritandem.triton_io.plugs.start import start_engine_calls

        self._plug = start_engine_calls(args)

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
