"""What a vllm-omni worker learns from us: load pushed weights, and say what it now holds.

Methods are called by name through the engine's collective_rpc. One worker per replica: tensor parallelism inside a
replica would shard what is fingerprinted here.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from megadiff.models.served_names import ServedPlace, served_places, served_view
from megadiff.parallel.garbage import freeze_startup_objects
from megadiff.parallel.lifeline import exit_with
from megadiff.weights.fingerprint import fingerprints
from megadiff.weights.manifest import Manifest


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    def re_init_pipeline(self, custom_pipeline_args: dict[str, Any]) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:  # a worker process of its own must not outlive the server
            exit_with(parent.pid)
        super().re_init_pipeline(custom_pipeline_args)
        freeze_startup_objects()

    def policy_manifest(self) -> Manifest:
        """Every tensor that a push must bring: diffusers name → dtype and shape."""
        parameters = self._parameters()
        views = {name: served_view(place, parameters=parameters) for name, place in self._places().items()}
        return {
            name: {"dtype": str(view.dtype).removeprefix("torch."), "shape": list(view.shape)}
            for name, view in views.items()
        }

    def load_bucket(self, path: str) -> None:
        """Copies the tensors of a safetensors file into the pipeline, through vllm-omni's own loader.

        The file's tensors are read one by one onto the pipeline's device and are never aliased: the loader copies.
        """
        pipeline = self.model_runner.pipeline
        with safe_open(Path(path), framework="pt", device=str(pipeline.device)) as file:
            pipeline.load_weights((name, file.get_tensor(name)) for name in file.keys())

    def fingerprints(self) -> dict[str, str]:
        """diffusers name → fingerprint of the tensor that the pipeline holds at this moment."""
        parameters = self._parameters()
        return fingerprints({name: served_view(place, parameters=parameters) for name, place in self._places().items()})

    def _parameters(self) -> dict[str, Tensor]:
        pipeline = self.model_runner.pipeline
        prefixes = tuple(f"{component}." for component in pipeline.policy_components)
        return {name: tensor for name, tensor in pipeline.named_parameters() if name.startswith(prefixes)}

    def _places(self) -> dict[str, ServedPlace]:
        return served_places(list(self._parameters()), names=self.model_runner.pipeline.served_names)
