"""Plug: Triton's model `scheduler` is `tritandem.triton_io.plugs.scheduler`.

Imports stand in `initialize`: Triton also loads this file once in a throw-away process to complete the configuration.
"""


class TritonPythonModel:
    def initialize(self, args):
        from tritandem.triton_io.plugs.start import start_scheduler

        self._plug = start_scheduler(args)

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
