"""What a vllm-omni worker learns from us: load pushed weights, bind a pushed LoRA, and say what it now uses.

Methods are called by name through the engine's collective_rpc, on every worker of the replica. The executor hands only the
first worker's result on: what returns something is gathered over the tensor-parallel group here.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.platforms import current_omni_platform

from megadiff.models.pipeline_stop import check_stop
from megadiff.models.registry import build_adapter
from megadiff.models.served_names import ServedPlace, served_places, served_view
from megadiff.parallel.collectives import gather_json
from megadiff.parallel.plan import is_lora, module_of
from megadiff.process.garbage import freeze_startup_objects
from megadiff.process.identity import device_name, host_name
from megadiff.process.lifeline import exit_with
from megadiff.rollout.worker.fp8 import Fp8Linears, fp8_targets
from megadiff.rollout.worker.freed_weights import FreedWeights, ParkedWeights
from megadiff.rollout.worker.lora import WRAPPED, PolicyLora, plain_name
from megadiff.rollout.worker.weight_feed import WeightFeed
from megadiff.sync.transports.receive import Receiver
from megadiff.tensors.boxes import worker_boxes
from megadiff.tensors.fingerprint import fingerprints
from megadiff.tensors.manifest import Manifest, folder_manifest
from megadiff.types import LoraSpec


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    lora_manager: PolicyLora
    _receiver: Receiver | None = None
    _feed: WeightFeed | None = None
    _served_places: dict[str, ServedPlace] | None = None
    _freed: FreedWeights | None = None
    _parked: ParkedWeights | None = None
    _fp8: Fp8Linears | None = None
    _has_new_weights = False  # of which there are no FP8 copies yet

    def init_device(self) -> None:
        """Meet the other workers at a file: vllm-omni's TCP store listens on all addresses."""
        folder = (self.od_config.custom_pipeline_args or {}).get("private_folder")
        if folder and not dist.is_initialized():
            size = self.od_config.num_gpus
            current_omni_platform.set_device(current_omni_platform.get_torch_device(self.rank))
            store = dist.FileStore(f"{folder}/workers", size)
            dist.init_process_group(
                current_omni_platform.dist_backend, store=store, rank=self.rank, world_size=size
            )
        super().init_device()

    def re_init_pipeline(self, custom_pipeline_args: dict[str, Any]) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:  # a worker process of its own must not outlive the server
            exit_with(parent.pid)
        super().re_init_pipeline(custom_pipeline_args)
        self._stop_when_told()
        if custom_pipeline_args.get("float32_streams"):
            self._keep_streams_in_float32()
        if custom_pipeline_args.get("fp8"):
            self._fp8 = Fp8Linears(
                self._fp8_layers(), in_place=custom_pipeline_args["fp8_in_place"]
            )
            self.trim()
        freeze_startup_objects()

    def init_lora_manager(self) -> None:
        """In place of vllm-omni's own manager, by which each request chooses its adapter or none."""
        self.lora_manager = PolicyLora(
            self.model_runner.pipeline, device=self.device, dtype=self.od_config.dtype
        )

    def policy_manifest(self) -> Manifest:
        """Every base tensor, in full: diffusers name → dtype and shape.

        Raises ValueError when the pipeline's tensors are not those of the model folder.
        """
        pipeline, views = self.model_runner.pipeline, self._shapes()
        manifest = folder_manifest(
            Path(pipeline.od_config.model), pipeline.policy_components, dtype="float32"
        )
        difference = views.keys() ^ manifest.keys()
        if difference:
            raise ValueError(
                f"{sorted(difference)[:5]} are in the pipeline or in the model folder, not in both"
            )
        return {
            name: {
                "dtype": str(view.dtype).removeprefix("torch."),
                "shape": manifest[name]["shape"],
            }
            for name, view in views.items()
        }

    def policy_places(self) -> dict[str, Any]:
        """`workers`, of each: host, device, and boxes, the parts that it has of tensors which it does not have whole."""
        rank, size, _ = _tensor_parallel()
        shapes = {name: row["shape"] for name, row in self.policy_manifest().items()}
        views = {name: list(view.shape) for name, view in self._shapes().items()}
        boxes = worker_boxes(shapes, views, rank=rank, size=size)
        return self._gathered(
            {
                "host": host_name(),
                "device": device_name(self.model_runner.pipeline.device),
                "boxes": boxes,
            }
        )

    def begin_push(self, transport: dict[str, Any]) -> None:
        """A push opens: what a broken-off one left is dropped, what free_weights() gave away is allocated or on its way back.
        Joins the trainer's group where there is one."""
        if self._fp8 is not None:
            self._fp8.make_room()
        if self._freed is not None:
            self._freed.take_back()
            self._freed = None
        if self._parked is not None:
            self._parked.fetch()
        self.lora_manager.drop_set_aside()
        with suppress(Exception):  # what the loader says of weights that did not all come
            self._close_feed()
        if self._receiver is None:
            self._receiver = Receiver(
                self.model_runner.pipeline.device, worker=_tensor_parallel()[0]
            )
        self._receiver.begin(transport)

    def load_bucket(self, source: dict[str, Any]) -> None:
        """Copies the tensors of a bucket into the pipeline, through vllm-omni's own loader; LoRA tensors are set aside.

        They are read one by one and never aliased: the memory is the sender's again afterwards.
        """
        with self._receiver.tensors(source) as pairs:
            self._load(pairs)

    def free_weights(self) -> None:
        """Gives the memory of all weights back to the device. What the base weights were is lost; the next push opens with
        memory for them and must bring them all. Text encoder and VAE wait in host memory; adapters stay."""
        if self._freed is None:
            if self._parked is None:
                self._parked = ParkedWeights(self._constant_parameters())
            self._parked.park()
            self._freed = FreedWeights(self._parameters().values())
            self._freed.free()
            if self._fp8 is not None:
                self._fp8.free_copies()
            self.trim()

    def trim(self) -> None:
        """Gives back the memory that the allocator keeps and nothing uses."""
        if self.model_runner.pipeline.device.type == "cuda":
            torch.cuda.empty_cache()

    def bind_lora(self, spec: dict[str, Any] | None) -> None:
        """Puts the LoRA tensors that were set aside to use; None: no LoRA is in use afterwards."""
        if self._feed is not None:
            self._close_feed()
            self._has_new_weights = True
        if self._receiver is not None:
            self._receiver.end()
        if self._parked is not None:
            self._parked.wait()
        lora = LoraSpec(**{**spec, "modules": tuple(spec["modules"])}) if spec else None
        self.lora_manager.bind(lora, places=self._places())

    def quantize(self) -> dict[str, bool]:
        """FP8 copies of what a push has brought, which fingerprints() has read. `keeps_weights`: whether what was brought stays
        beside them, so that the next push may leave it out."""
        if self._fp8 is not None and self._has_new_weights:
            self._fp8.refresh()
            if self._fp8.in_place:
                self.trim()
        self._has_new_weights = False
        return {"keeps_weights": self._fp8 is None or self._fp8.keeps_weights}

    def fingerprints(self) -> dict[str, Any]:
        """`workers`, of each: fingerprints, name → digits of what the pipeline computes with at this moment (LoRA tensors as
        `used_tensor` has them); bound_modules, of LoRA. Raises RuntimeError where only FP8 copies are left."""
        if self._fp8 is not None and not self._fp8.keeps_weights:
            raise RuntimeError(
                "the weights have given way to their FP8 copies; fingerprints are taken before quantize()"
            )
        places = self._places()
        prints = fingerprints(self._views() | self.lora_manager.used(places=places))
        return self._gathered(
            {
                "fingerprints": prints,
                "bound_modules": self.lora_manager.bound_modules(places=places),
            }
        )

    def _load(self, pairs: Iterator[tuple[str, Tensor]]) -> None:
        """One call of the loader takes all buckets of a push: it ends before LoRA wraps other layers."""
        base = self._base_tensors(pairs)
        first = next(base, None)
        if first is None:
            return
        if self._feed is None:
            pipeline = self.model_runner.pipeline
            self._feed = WeightFeed(pipeline.load_weights, pipeline.device)
        self._feed.give(chain([first], base))

    def _close_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def _base_tensors(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Sets LoRA tensors aside, and hands the others on under the names by which the loader finds them now: it would
        skip a layer that LoRA has wrapped under its plain name.

        Raises ValueError for a name that the pipeline does not have, which the loader would skip too.
        """
        places = self._places()
        for name, tensor in pairs:
            if is_lora(name):
                self.lora_manager.set_aside(name, tensor)
            elif name not in places:
                raise ValueError(f"the replica's model has no tensor {name}")
            elif self.lora_manager.wraps(module_of(places[name].parameter)):
                yield f"{module_of(name)}.{WRAPPED}.{name.rpartition('.')[2]}", tensor
            else:
                yield name, tensor

    def _stop_when_told(self) -> None:
        """Look before each forward pass of the policy whether its request was given up."""
        pipeline = self.model_runner.pipeline
        group = get_tp_group()

        def check(*_: object) -> None:
            check_stop(
                pipeline.stop_path,
                size=group.world_size,
                first_rank=group.first_rank,
                group=group.cpu_group,
            )

        for component in pipeline.policy_components:
            pipeline.get_submodule(component).register_forward_pre_hook(check)

    def _keep_streams_in_float32(self) -> None:
        pipeline = self.model_runner.pipeline
        adapter = build_adapter(Path(pipeline.od_config.model))
        for component in pipeline.policy_components:
            adapter.keep_streams_in_float32(
                pipeline.get_submodule(component), pipeline.od_config.dtype
            )

    def _fp8_layers(self) -> dict[str, nn.Module]:
        """Served name → layer, of the linears whose products FP8 takes over."""
        pipeline, places, layers = self.model_runner.pipeline, self._places(), {}
        plan = build_adapter(Path(pipeline.od_config.model)).plan
        for component in pipeline.policy_components:
            names = [
                name.removeprefix(f"{component}.")
                for name in places
                if name.startswith(f"{component}.")
            ]
            served = {
                module_of(places[f"{component}.{name}"].parameter)
                for name in fp8_targets(names, plan)
            }
            layers |= {name: pipeline.get_submodule(name) for name in sorted(served)}
        return layers

    def _gathered(self, value: dict[str, Any]) -> dict[str, Any]:
        """`workers`: this value of every worker, in order. (A bare list would be unpacked on its way to the server.)"""
        _, size, group = _tensor_parallel()
        return {"workers": gather_json(value, group) if size > 1 else [value]}

    def _views(self) -> dict[str, Tensor]:
        """Diffusers name → this worker's part of the tensor, in the pipeline's own memory."""
        return self._served(self._parameters())

    def _shapes(self) -> dict[str, Tensor]:
        """As _views(), without memory: weights need not have any at the moment."""
        return self._served(
            {name: torch.empty_like(one, device="meta") for name, one in self._parameters().items()}
        )

    def _served(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: served_view(place, parameters=parameters)
            for name, place in self._places().items()
        }

    def _parameters(self) -> dict[str, Tensor]:
        """The base weights as vllm-omni packs them, under the names that they have while LoRA wraps nothing."""
        named = self.model_runner.pipeline.named_parameters()
        return {
            plain_name(name): tensor
            for name, tensor in named
            if name.startswith(self._policy_prefixes)
        }

    def _constant_parameters(self) -> list[Tensor]:
        """Of all components that no push reaches: text encoder, VAE, and so on."""
        named = self.model_runner.pipeline.named_parameters()
        return [tensor for name, tensor in named if not name.startswith(self._policy_prefixes)]

    @property
    def _policy_prefixes(self) -> tuple[str, ...]:
        return tuple(f"{component}." for component in self.model_runner.pipeline.policy_components)

    def _places(self) -> dict[str, ServedPlace]:
        """Of the base weights: the same for as long as the pipeline lives."""
        if self._served_places is None:
            names = self.model_runner.pipeline.served_names
            self._served_places = served_places(list(self._parameters()), names=names)
        return self._served_places


def _tensor_parallel() -> tuple[int, int, dist.ProcessGroup]:
    """(rank, size, CPU group) of this worker among those that share the transformer's weights."""
    group = get_tp_group()
    return group.rank_in_group, group.world_size, group.cpu_group
