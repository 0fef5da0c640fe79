"""Plug: Triton's model `engine` is `tritandem.triton_io.engine_plug` over an EngineService."""

import dataclasses
import json

import triton_python_backend_utils as pb_utils
from tritandem.config import config_from_environment, model_folder_from_environment
from tritandem.engine.service import build_engine
from tritandem.triton_io.engine_plug import EnginePlug


class TritonPythonModel:
    def initialize(self, args):
        config = config_from_environment().engine
        device = json.loads(args["model_config"])["parameters"]["device"]["string_value"]
        if device:
            config = dataclasses.replace(config, device=device)
        service = build_engine(model_folder_from_environment(), config, pb_utils.Logger.log_info)
        self._plug = EnginePlug(service, config.stream_idle_s)

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
