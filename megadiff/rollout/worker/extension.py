"""Teach a vllm-omni worker to load pushed weights, bind a pushed LoRA, and say what it now uses.

Methods are called by name through the engine's collective_rpc, on every worker of the replica. The
executor hands only the first worker's result on, so results are gathered over the tensor-parallel
group here.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
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
from megadiff.models.served_names import ServedPlaces, served_places, served_view
from megadiff.parallel.collectives import gather_json
from megadiff.parallel.plan import FROZEN, ParallelPlan, is_lora, module_of
from megadiff.process.garbage import FirstRounds, freeze_startup_objects
from megadiff.process.gloo import share_devices
from megadiff.process.identity import device_name, host_name
from megadiff.process.lifeline import exit_with
from megadiff.process.stacks import announce
from megadiff.process.title import set_title
from megadiff.rollout.next_call import NextCall
from megadiff.rollout.spec import process_title
from megadiff.rollout.worker.compiled import tune_blocks
from megadiff.rollout.worker.fp8 import Fp8Linears
from megadiff.rollout.worker.freed_weights import FreedWeights, ParkedWeights
from megadiff.rollout.worker.lora import WRAPPED, PolicyLora
from megadiff.rollout.worker.trace import WorkerTrace
from megadiff.rollout.worker.weight_feed import Pairs, WeightFeed
from megadiff.sync.shared_base import MAPPED, MappedMemory
from megadiff.sync.transports.receive import Receiver
from megadiff.tensors.boxes import worker_boxes
from megadiff.tensors.fingerprint import fingerprints
from megadiff.tensors.manifest import Manifest, folder_manifest
from megadiff.types import JsonObject, LoraSpec, Tensors

# Of a replica's first pushes those behind which it compiles: before the gate, after it, two steps.
COMPILING_PUSHES = 4


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Add our methods to vllm-omni's worker class, which has no constructor of ours."""

    lora_manager: PolicyLora
    _freed: FreedWeights | None = None
    _parked: ParkedWeights | None = None
    _fp8 = Fp8Linears({})  # of no layer, unless the replica was told to compute in FP8
    _has_new_weights = False  # base weights or LoRA that have no FP8 copies yet
    _compiling = FirstRounds(0)
    _trace = WorkerTrace()

    def init_device(self) -> None:
        """Meet the other workers at a file: vllm-omni's TCP store listens on all addresses."""
        share_devices()
        folder = (self.od_config.custom_pipeline_args or {}).get("private_folder")
        if folder and not dist.is_initialized():
            size = self.od_config.num_gpus
            # before the group, which opens its connections on the current device
            current_omni_platform.set_device(current_omni_platform.get_torch_device(self.rank))
            store = dist.FileStore(f"{folder}/workers", size)
            dist.init_process_group(
                current_omni_platform.dist_backend, store=store, rank=self.rank, world_size=size
            )
        super().init_device()

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load a pipeline without walks through all that was imported."""
        # vllm-omni collects garbage six times meanwhile: a fifth of a replica's start.
        gc.freeze()
        super().load_model(*args, **options)

    def re_init_pipeline(self, custom_pipeline_args: JsonObject) -> None:
        """Load our pipeline, and prepare it as the replica was told to compute."""
        parent = multiprocessing.parent_process()
        # a worker process of its own must not outlive the server
        if parent is not None and parent.pid is not None:
            exit_with(parent.pid)
            # vllm-omni calls all of them DiffusionWorker
            name = custom_pipeline_args["name"]
            set_title(process_title(name, custom_pipeline_args["run"], f"worker {self.rank}"))
            if stacks := custom_pipeline_args["stacks"]:
                announce(Path(stacks), f"{name}_worker_{self.rank}")

        super().re_init_pipeline(custom_pipeline_args)
        self._stop_when_told()

        if custom_pipeline_args.get("float32_streams"):
            for component in self._components:
                self._pipeline.adapter.keep_streams_in_float32(
                    self._pipeline.get_submodule(component), self._pipeline.od_config.dtype
                )

        if not self.od_config.enforce_eager:
            self._compiling = FirstRounds(COMPILING_PUSHES)
            for component in self._components if self._pipeline.device.type == "cuda" else ():
                network = self._pipeline.get_submodule(component)
                tune_blocks(network, num_rows=lambda: self._pipeline.num_rows)

        if custom_pipeline_args.get("fp8"):
            in_place = custom_pipeline_args["fp8_in_place"]
            self._fp8 = Fp8Linears(self._fp8_layers(), in_place=in_place)
            self.trim()

        folder = custom_pipeline_args.get("private_folder")
        # workers of one replica would have to agree on what they prepare
        if folder and self._pipeline.prepares_ahead and dist.get_world_size() == 1:
            self._pipeline.next_call = NextCall(Path(folder), self._pipeline.device)
        freeze_startup_objects()

    def init_lora_manager(self) -> None:
        """Replace vllm-omni's own manager, by which each request chooses its LoRA or none."""
        self.lora_manager = PolicyLora(
            self._pipeline, device=self.device, dtype=self.od_config.dtype
        )

    def describe(self) -> JsonObject:
        """Return `manifest`, of every base tensor in full, and `workers`: host, device and boxes.

        boxes: the parts that a worker has of the tensors which it does not have whole.
        Raises ValueError when the pipeline's tensors are not those of the model folder.
        """
        pipeline = self._pipeline
        views = self._views(meta=True)  # FP8 copies may have taken the weights' memory already
        rows = folder_manifest(
            Path(pipeline.od_config.model), self._components, dtype="float32", plan=self._plan
        )
        difference = views.keys() ^ rows.keys()
        if difference:
            raise ValueError(
                f"{sorted(difference)[:5]} are in the pipeline or in the model folder, not in both"
            )

        # The pipeline's dtype, but the folder's shape: a worker may have a part of the tensor.
        manifest: Manifest = {}
        for name, view in views.items():
            dtype = str(view.dtype).removeprefix("torch.")
            manifest[name] = {"dtype": dtype, "shape": rows[name]["shape"]}

        group = get_tp_group()
        boxes = worker_boxes(
            {name: row["shape"] for name, row in manifest.items()},
            {name: view.shape for name, view in views.items()},
            rank=group.rank_in_group,
            size=group.world_size,
        )

        worker = {"host": host_name(), "device": device_name(pipeline.device), "boxes": boxes}
        return {"manifest": manifest, **self._gathered(worker)}

    def begin_push(self, transport: JsonObject) -> None:
        """Open a push: allocate what free_weights() gave away, drop what a broken-off push left.

        Joins the trainer's group where the transport has one.
        """
        self._compiling.end()
        self._pipeline.drop_prepared()
        self._fp8.make_room()
        if self._freed is not None:
            self._freed.take_back()
            self._freed = None
        if self._parked is not None:
            self._parked.fetch()
        self.lora_manager.drop_set_aside()
        with suppress(Exception):  # the loader complains of weights that did not all come
            self._feed.close()
        self._receiver.begin(transport)

    def load_bucket(self, source: JsonObject) -> None:
        """Copy a bucket's tensors into the pipeline, by vllm-omni's own loader; set LoRA aside.

        Tensors are read one by one and never aliased: the memory is the sender's again afterwards.
        But those of a shared base are mapped.
        """
        if source["transport"] == MAPPED:
            self._map_base(source)
            return
        with self._receiver.tensors(source) as pairs:
            self._load(pairs)

    def free_weights(self) -> None:
        """Give the memory of all weights back to the device, but for a mapped base.

        The base weights are lost; the next push opens with memory for them and must bring them all.
        Text encoder and VAE wait in host memory. The LoRA layers stay.
        """
        if self._freed is not None:
            return
        self._pipeline.drop_prepared()
        if self._parked is None:
            self._parked = ParkedWeights(self._parameters(pushed=False).values())
        self._parked.park()
        maps_base = self._pipeline.maps_base  # it is the trainer's
        self._freed = FreedWeights([] if maps_base else self._parameters().values())
        self._freed.free()
        self._fp8.free_copies()
        self._has_new_weights = True  # also those of a mapped base, which stay
        self.trim()

    def trim(self) -> None:
        """Give back the memory that the allocator keeps and nothing uses."""
        if self._pipeline.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin_trace(self) -> None:
        """Trace this worker from now on."""
        self._trace.begin()

    def end_trace(self, path: str) -> None:
        """Let the first worker write its trace; the others' are dropped."""
        if get_tp_group().rank_in_group == 0:
            self._trace.end(path)
        else:
            self._trace.drop()

    def bind_lora(self, spec: JsonObject | None) -> None:
        """Put the LoRA tensors that were set aside to use; None: no LoRA is in use afterwards."""
        self._feed.close()
        self._receiver.end()
        if self._parked is not None:
            self._parked.wait()
        lora = LoraSpec(**{**spec, "modules": tuple(spec["modules"])}) if spec else None
        self._has_new_weights |= lora != self.lora_manager.spec
        self.lora_manager.bind(lora, places=self._places)

    def quantize(self) -> dict[str, bool]:
        """Make FP8 copies of what a push has brought, after fingerprints() has read it.

        `keeps_weights` tells whether the weights stay, so that the next push may leave them out.
        """
        if self._has_new_weights:
            self._fp8.refresh(self.lora_manager.product)
            if self._fp8.in_place:
                self.trim()
        self._has_new_weights = False
        return {"keeps_weights": self._fp8.keeps_weights}

    def fingerprints(self) -> JsonObject:
        """Return `workers`, each with fingerprints and the LoRA's bound_modules.

        fingerprints: name → digits of what the pipeline computes with at this moment, LoRA tensors
        as `used_tensor` has them. Raises RuntimeError where only FP8 copies are left.
        """
        if not self._fp8.keeps_weights:
            raise RuntimeError(
                "the weights have given way to their FP8 copies; fingerprints are taken before "
                "quantize()"
            )
        used = self._views() | self.lora_manager.used()
        bound_modules = self.lora_manager.bound_modules(places=self._places)

        return self._gathered({"fingerprints": fingerprints(used), "bound_modules": bound_modules})

    def _map_base(self, source: JsonObject) -> None:
        """Make the parameters of a bucket's weights views of the trainer's memory.

        Raises ValueError in a replica with weights of its own, or for weights that do not fit.
        """
        if not self._pipeline.maps_base:
            raise ValueError(
                "this replica holds weights of its own; start it with --shared-base, or set "
                "lora.shared_base=never"
            )
        parameters = self._parameters()
        for name, view in self._mapped.views(source, self._places, parameters):
            parameters[name].data = view
        self._has_new_weights = True
        self._pipeline.is_empty = False  # models/empty_weights.py has set it

    def _load(self, pairs: Pairs) -> None:
        """Load a bucket. One call of the loader takes all buckets: it ends before LoRA wraps."""
        base = self._base_tensors(pairs)
        first = next(base, None)
        if first is not None:  # a bucket of LoRA tensors alone opens no loader
            self._has_new_weights = True
            self._feed.give(chain([first], base))

    def _base_tensors(self, pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
        """Set LoRA tensors aside; yield the others under the names that the loader knows now.

        The loader would skip a layer that LoRA has wrapped under its plain name. It would also skip
        a name that the pipeline does not have: that raises ValueError here.
        """
        for name, tensor in pairs:
            served = self._places.get(name)
            if is_lora(name):
                self._has_new_weights = True
                self.lora_manager.set_aside(name, tensor)
            elif served is None:
                raise ValueError(f"the replica's model has no tensor {name}")
            elif self._pipeline.maps_base:
                raise ValueError(f"{name} is of a base that this replica maps; it takes no copy")
            elif self.lora_manager.wraps(module_of(served.parameter)):
                yield f"{module_of(name)}.{WRAPPED}.{name.rpartition('.')[2]}", tensor
            else:
                yield name.replace(FROZEN, ""), tensor

    def _stop_when_told(self) -> None:
        """Look before each forward pass of the policy whether its request was given up."""
        pipeline = self._pipeline
        group = get_tp_group().cpu_group

        def check(*_: object) -> None:
            check_stop(pipeline.stop_path, group)

        for component in self._components:
            pipeline.get_submodule(component).register_forward_pre_hook(check)

    def _fp8_layers(self) -> dict[str, nn.Module]:
        """Return served name → layer, of the linears whose products FP8 takes over."""
        layers: dict[str, nn.Module] = {}
        for component in self._components:
            prefix = f"{component}."
            names = [name for name in self._places if name.startswith(prefix)]
            targets = self._plan.fp8_weights(name.removeprefix(prefix) for name in names)
            served = {module_of(self._places[prefix + name].parameter) for name in targets}
            layers |= {name: self._pipeline.get_submodule(name) for name in sorted(served)}
        return layers

    def _gathered(self, value: JsonObject) -> JsonObject:
        """Return `workers`: this value of every worker, in order."""
        group = get_tp_group()
        workers = gather_json(value, group.cpu_group) if group.world_size > 1 else [value]
        return {"workers": workers}  # the server's side would unpack a bare list of one

    def _views(self, *, meta: bool = False) -> Tensors:
        """Return diffusers name → this worker's part of the tensor, in the pipeline's memory.

        meta: on torch's meta device instead, for weights without any memory at the moment.
        """
        parameters = self._parameters()
        if meta:
            parameters = {name: tensor.to("meta") for name, tensor in parameters.items()}
        return {
            name: served_view(served, parameters=parameters)
            for name, served in self._places.items()
        }

    def _parameters(self, *, pushed: bool = True) -> Tensors:
        """Return the base weights as vllm-omni packs them, under their names without LoRA.

        pushed=False: those that no push reaches instead, of the text encoder, the VAE and so on.
        """
        return {
            # the name before LoRA wrapped the layer
            name.replace(f".{WRAPPED}.", "."): tensor
            for name, tensor in self._pipeline.policy_parameters()
            if (name.partition(".")[0] in self._components) == pushed
        }

    # What follows holds for as long as the pipeline lives, and needs a loaded pipeline.

    @property
    def _pipeline(self) -> Any:
        return self.model_runner.pipeline

    @property
    def _components(self) -> tuple[str, ...]:
        return self._pipeline.policy_components

    @property
    def _plan(self) -> ParallelPlan:
        return self._pipeline.adapter.plan

    @cached_property
    def _places(self) -> ServedPlaces:
        """Name on the way here → where a base weight lives."""
        served = served_places(list(self._parameters()), names=self._pipeline.served_names)
        sent: ServedPlaces = {}
        for component in self._components:
            start = f"{component}."
            names = [name.removeprefix(start) for name in served if name.startswith(start)]
            for name, sent_name in self._plan.sent_names(component, names).items():
                sent[sent_name] = served[start + name]
        return sent

    @cached_property
    def _receiver(self) -> Receiver:
        return Receiver(self._pipeline.device, worker=get_tp_group().rank_in_group)

    @cached_property
    def _mapped(self) -> MappedMemory:
        return MappedMemory(self._pipeline.device)

    @cached_property
    def _feed(self) -> WeightFeed:
        return WeightFeed(self._pipeline.load_weights, self._pipeline.device)
