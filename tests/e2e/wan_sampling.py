"""Draws groups of a Wan folder with vllm-omni, in this process, and writes them down: python wan_sampling.py FOLDER OUT."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from megadiff.models.rollout_base import REQUESTS_KEY, RESULT_KEY
from megadiff.rollout.omni_app import EngineConfig, build_engine, call_worker
from megadiff.rollout.worker_extension import RolloutWorkerExtension
from megadiff.types import Prompt, RolloutRequest, Sampling
from megadiff.weights.fingerprint import fingerprints

PLAIN = Sampling(height=64, width=96, num_frames=5, num_inference_steps=6, sde_window_size=4, sde_window_range=(1, 5))
SAMPLINGS = {
    "plain": PLAIN,
    "guided": dataclasses.replace(PLAIN, guidance_scale=3.0),
    "ode": dataclasses.replace(PLAIN, sde_type="ode"),
}
TEXTS = ("a red circle", "two blue stars on  white, 猫", "a red circle")
REQUESTS = [
    RolloutRequest(
        prompt=Prompt(text=text, id=f"{place:016x}", negative_text="bad" * place),
        sampling=PLAIN,
        sample_indices=tuple(range(place + 1)),
        seed=0,
        step=0,
    )
    for place, text in enumerate(TEXTS)
]


class TellingWorker(RolloutWorkerExtension):
    def base_fingerprints(self) -> dict[str, str]:
        return fingerprints(self._views())


async def main(folder: Path, out: Path) -> None:
    engine = build_engine(
        EngineConfig(
            model=folder,
            name="wan",
            dtype="float32",
            pipeline="megadiff.models.wan22.rollout.WanRolloutPipeline",
            worker_extension="tests.e2e.wan_sampling.TellingWorker",
        )
    )
    has_two = (folder / "transformer_2").is_dir()
    for name, sampling in SAMPLINGS.items():
        if name == "guided" and has_two:
            sampling = dataclasses.replace(sampling, guidance_scale_2=2.0)
        result = await _drawn(engine, [dataclasses.replace(request, sampling=sampling) for request in REQUESTS])
        save_file(result, out / f"{name}.safetensors")
    too_long = dataclasses.replace(REQUESTS[0].prompt, text="x" * 600)
    (out / "refusal.txt").write_text(await _refused(engine, dataclasses.replace(REQUESTS[0], prompt=too_long)))
    (out / "held.json").write_text(json.dumps(await call_worker(engine, "base_fingerprints")))
    engine.shutdown()


async def _drawn(engine: Any, requests: list[RolloutRequest]) -> dict:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    parameters = OmniDiffusionSamplingParams(
        num_outputs_per_prompt=sum(len(request.sample_indices) for request in requests),
        extra_args={REQUESTS_KEY: tuple(requests)},
    )
    outputs = engine.generate(prompt={"prompt": "-"}, request_id="rl", sampling_params_list=[parameters])
    return [output async for output in outputs][-1].multimodal_output["metadata"][RESULT_KEY]


async def _refused(engine: Any, request: RolloutRequest) -> str:
    try:
        await _drawn(engine, [request])
    except Exception as error:  # vllm-omni's own, of a class that depends on its version
        return str(error)
    return ""


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
