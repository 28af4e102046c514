"""A vllm-omni engine with our pipeline, in a process of its own, whose worker can also be asked
what vllm-omni itself does.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.rollout.worker.extension import RolloutWorkerExtension

SEED = 3


class TrapExtension(RolloutWorkerExtension):
    """Our worker extension, and beside it vllm-omni's own ways, which our code does not take."""

    def push(self, tensors: Mapping[str, Tensor], lora: dict[str, Any] | None) -> None:
        """A whole push of tensors that lie in the caller's memory."""
        self.begin_push({"name": "http"})
        self._load(iter(tensors.items()))
        self.bind_lora(lora)

    def push_and_overwrite(self, tensors: Mapping[str, Tensor], lora: dict[str, Any]) -> None:
        """The same from memory that the caller fills anew, bucket after bucket, before the
        commit.
        """
        self.begin_push({"name": "http"})
        for name, tensor in tensors.items():
            self._load(iter([(name, tensor)]))
            tensor.fill_(7)
        self.bind_lora(lora)

    def push_norm(self, tensors: Mapping[str, Tensor], lora: dict[str, Any]) -> None:
        """A LoRA on a module that is no linear, in place of another."""
        first, *others = lora["modules"]
        norm = "transformer_blocks.0.attn.norm_q"
        renamed = {
            name.replace(f".{first}.", f".{norm}."): tensor for name, tensor in tensors.items()
        }
        self.push(renamed, {**lora, "modules": [norm, *others]})

    def damage(self, kind: str, module: str) -> None:
        """Spoils what the worker holds of a module, behind everyone's back.

        kind: one of "flip A", "flip B", "flip base", "unbind".
        """
        (place,) = (
            place for name, place in self._places.items() if name == f"transformer.{module}.weight"
        )
        layer = self.lora_manager._lora_modules[place.parameter.removesuffix(".weight")]
        if kind == "unbind":
            active = list(layer._diffusion_lora_active_slices)
            active[place.shard] = False
            layer._diffusion_lora_active_slices = tuple(active)
            return
        stacked = {"flip A": layer.lora_a_stacked, "flip B": layer.lora_b_stacked}
        tensor = layer.base_layer.weight if kind == "flip base" else stacked[kind][place.shard]
        tensor.detach().view(torch.int32).view(-1)[5] ^= 1

    def bound(self) -> tuple[str, ...]:
        return tuple(self.lora_manager.bound_modules(places=self._places))

    def used(self) -> dict[str, Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in (self._views() | self.lora_manager.used()).items()
        }

    def caller_keeps(self, tensors: Mapping[str, Tensor], lora: dict[str, Any]) -> bool:
        """Whether the caller's tensors are what they were after two pushes from the same memory."""
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for _ in range(2):
            self.push(tensors, lora)
        return all(torch.equal(before[name], tensor) for name, tensor in tensors.items())

    def fail(self) -> None:
        raise KeyError("on purpose")

    def stock_load(self, tensors: Mapping[str, Tensor]) -> int:
        """vllm-omni's own loading of full weights: the number of names that it says it loaded."""
        return len(self.model_runner.pipeline.load_weights(iter(tensors.items())))

    def stock_lora(
        self, tensors: Mapping[str, Tensor], rank: int, alpha: int
    ) -> tuple[list[str], bool]:
        """What vllm-omni does with an adapter that is handed over in memory: (modules that its
        manager would wrap and bind, whether the caller's tensors are what they were).
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

        before = {name: tensor.clone() for name, tensor in tensors.items()}
        names = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
        helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=names)
        named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        model = LoRAModel.from_lora_tensors(
            lora_model_id=1,
            tensors=named,
            peft_helper=helper,
            device="cpu",
            dtype=torch.float32,
        )
        for lora in model.loras.values():
            lora.optimize()
        kept = all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
        served = {name for name, _ in self.model_runner.pipeline.named_modules()}
        manager = DiffusionLoRAManager(
            self.model_runner.pipeline, torch.device("cpu"), torch.float32
        )
        parts = manager._packed_modules_mapping
        fused = {
            f"{name.rpartition('.')[0]}.{part}"
            for name in served
            for part in parts.get(name.rpartition(".")[2], ())
        }
        return sorted(name for name in model.loras if name in served | fused), kept


class TrapEngine:
    """The engine as a test sees it.

    call() raises RuntimeError with the worker's message, as the replica's calls do.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, method: str, *arguments: object) -> Any:
        return self._ask("call", method, arguments)

    def raw(self, method: str) -> Any:
        """What vllm-omni's own collective_rpc returns."""
        return self._ask("raw", method, ())

    def sample(self) -> dict[str, Tensor]:
        """Two samples of one prompt: latents, log_probs and pixels, on noise that is always the
        same.
        """
        return self._ask("sample", "", ())

    def _ask(self, kind: str, method: str, arguments: tuple) -> Any:
        self._connection.send((kind, method, arguments))
        done, value = self._connection.recv()
        if not done:
            raise RuntimeError(value)
        return value


@contextmanager
def trap_engine(model: Path) -> Iterator[TrapEngine]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, model))
    process.start()
    theirs.close()  # so that a dead engine is an EOFError here
    try:
        yield TrapEngine(ours)
    finally:
        ours.close()
        process.join(20)
        process.kill()


def _main(connection: Connection, model: Path) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve(connection, model))


async def _serve(connection: Connection, model: Path) -> None:
    from megadiff.rollout.server.omni_app import build_engine, call_worker
    from megadiff.rollout.spec import ReplicaSpec

    engine = build_engine(
        ReplicaSpec(model=model, name="traps", dtype="float32"),
        pipeline="megadiff.models.qwen_image.pipeline.QwenImageRolloutPipeline",
        worker_extension="tests.e2e.trap_engine.TrapExtension",
    )
    try:
        while True:
            kind, method, arguments = await asyncio.to_thread(connection.recv)
            try:
                if kind == "sample":
                    value = await _sample(engine)
                elif kind == "raw":
                    value = await engine.collective_rpc(method)
                else:
                    value = await call_worker(engine, method, *arguments)
                connection.send((True, value))
            except RuntimeError as error:
                connection.send((False, str(error)))
    except EOFError:
        engine.shutdown()


async def _sample(engine: Any) -> dict[str, Tensor]:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    from megadiff.models.pipeline_base import REQUESTS_KEY, RESULT_KEY
    from megadiff.types import Prompt, RolloutRequest, Sampling

    sampling = Sampling(height=64, width=64, num_inference_steps=4, sde_window_range=(0, 3))
    prompt = Prompt(text="a red cat", id="ab" * 8)
    request = RolloutRequest(
        prompt=prompt, sampling=sampling, sample_indices=(0, 1), seed=SEED, step=1
    )
    parameters = OmniDiffusionSamplingParams(
        height=64,
        width=64,
        num_inference_steps=4,
        true_cfg_scale=1.0,
        num_outputs_per_prompt=2,
        extra_args={REQUESTS_KEY: (request,)},
    )
    outputs = engine.generate(
        prompt={"prompt": prompt.text}, request_id="x", sampling_params_list=[parameters]
    )
    result = [output async for output in outputs][-1].multimodal_output["metadata"][RESULT_KEY]
    return {name: result[name] for name in ("latents", "log_probs", "pixels")}
