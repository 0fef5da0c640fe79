"""Plug: Triton's model `engine` is `tritandem.triton_io.plugs.engine`.

Imports stand in `initialize`: Triton also loads this file once in a throw-away process to complete the configuration.
"""


class TritonPythonModel:
    def initialize(self, args):
        from tritandem.triton_io.plugs.process import Process

        process = Process(args)  # before what follows is imported
        from tritandem.triton_io.plugs.early_imports import import_beside

        import_beside()
        from tritandem.triton_io.plugs.engine_start import start

        self._plug = start(process)

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
