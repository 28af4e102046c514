"""Evaluate through the replicas: ODE samples on fixed noise, scored by the run's rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, cycle, groupby, islice, zip_longest
from statistics import fmean
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.observe import diversity
from megadiff.observe.evaluation import (
    EvaluatedSample,
    Evaluation,
    Identity,
    estimate,
    image_name,
)
from megadiff.observe.metrics import DIVERSITY
from megadiff.observe.samples import picture_suffix
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import gather_json
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import TOTAL, Scorer
from megadiff.rollout.client.fleet import Fleet
from megadiff.train.sampling import Draw, Redrawable, sampling_of
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling, Tensors

EVAL_STEP = -1  # of the noise identity: never a training step, and the same at every evaluation
NUM_IMAGES = 28  # saved to be looked at, over all tasks
# Samples whose pixels are in memory until they are scored: at most 512, and at most 2 GiB
# (36 videos of 49 frames at 480 x 832).
SAMPLES_AT_ONCE = 512
PIXEL_BYTES_AT_ONCE = 2 * 2**30

Plan = list[tuple[Prompt, range]]  # each prompt once, with the indices of its samples


def eval_sampling(config: Config) -> Sampling:
    """Return how evaluations are sampled: as the rollout, but by Euler's ODE steps alone."""
    sampling = sampling_of(config.rollout)
    steps = config.eval.num_inference_steps or sampling.num_inference_steps
    return replace(
        sampling,
        num_inference_steps=steps,
        sde_type="ode",
        sde_window_size=0,
        # every sample has noise of its own, and figures of runs with other solvers compare
        same_noise=False,
        ode_solver="euler",
    )


def spread(prompts: Sequence[Prompt], num_samples: int) -> Plan:
    """Plan the samples of an evaluation, the same for every model and layout.

    num_samples: in all; 0 means one a prompt. Every task gets the same number (± 1, the first
    ones more), and within a task so does every prompt, in file order. A prompt that repeats an
    earlier one is left out: it would draw the same noise.
    Raises ValueError for fewer samples than tasks.
    """
    by_id: dict[str, Prompt] = {}
    for prompt in prompts:
        by_id.setdefault(prompt.id, prompt)  # the first: its columns route rewards
    unique = list(by_id.values())
    if not num_samples:
        return [(prompt, range(1)) for prompt in unique]

    by_task: dict[str, list[Prompt]] = {}
    for prompt in unique:
        by_task.setdefault(task_of(prompt), []).append(prompt)
    if num_samples < len(by_task):
        raise ValueError(
            f"{num_samples} samples < {len(by_task)} tasks of the prompts ({', '.join(by_task)}); "
            f"every task needs one: set --num-samples or eval.num_samples to {len(by_task)} or more"
        )

    # dealt like cards: to the tasks in turn, and within a task to its prompts in turn
    turns = {task: cycle(task_prompts) for task, task_prompts in by_task.items()}
    counts = Counter(next(turns[task]).id for task in islice(cycle(by_task), num_samples))
    return [
        (prompt, range(counts[prompt.id]))
        for prompt in chain.from_iterable(by_task.values())
        if counts[prompt.id]
    ]


def task_of(prompt: Prompt) -> str:
    """Return the prompt file's `task` column, "" without one."""
    task = prompt.fields.get("task")
    return "" if task is None else str(task)


def pictured(plan: Plan, count: int = NUM_IMAGES) -> set[Identity]:
    """Choose `count` samples whose images are saved.

    Tasks take turns; within a task, first samples of different prompts come first.
    """
    by_task: dict[str, list[Identity]] = {}
    for index in range(count):
        for prompt, indices in plan:
            if index in indices:
                by_task.setdefault(task_of(prompt), []).append((prompt.id, index))
    turns = chain.from_iterable(zip_longest(*by_task.values()))
    return set(islice(filter(None, turns), count))


class Finish(Protocol):
    """Run a draw on the ranks where `here` is true until it is done on all. Collective."""

    def __call__(self, draw: Redrawable, *, here: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An evaluation and its images: a sample's `file` → its pixels, uint8 [F, H, W, 3].

    Images are on rank 0, which writes them; the other ranks have none.
    """

    evaluation: Evaluation
    images: Tensors


def evaluate(
    fleet: Fleet,
    finish: Finish,
    scorer: Scorer,
    plan: Plan,
    config: Config,
    *,
    adapter: ModelAdapter,
    policy_version: int | None,
    mesh: Mesh,
    model: str,
    on_samples: Callable[[int], object] = lambda count: None,
) -> Outcome:
    """Sample and score the plan; all ranks return the same evaluation. Collective.

    Data-parallel ranks divide the prompts.
    finish: runs a draw again where replicas were lost. config: says how samples are drawn. model:
    its name in the record. on_samples: called with the number of samples that arrived.
    Raises AgreedError when a replica or reward fails.
    """
    requests = _requests(plan[mesh.dp_rank :: mesh.dp], config, policy_version=policy_version)
    wanted = pictured(plan)
    draw_of = partial(Draw, fleet, scorer, adapter=adapter, timers=Timers(), on_samples=on_samples)
    scoring = _Scoring(draw_of, requests, scorer, wanted)
    finish(scoring, here=mesh.is_model_group_source)  # its peers would ask for the same samples
    scored = _gather(scoring.scored, mesh=mesh)

    identities = [(prompt.id, index) for prompt, indices in plan for index in indices]
    # in the plan's order, whatever rank drew a sample
    order = {identity: position for position, identity in enumerate(identities)}

    evaluation = Evaluation(
        **vars(eval_sampling(config)),
        model=model,
        step=policy_version or 0,
        seed=config.seed,
        samples=sorted(scored.samples, key=lambda sample: order[sample.identity]),
        diversity={name: _mean_figure(scored.figures, name) for name in DIVERSITY},
    )
    return Outcome(evaluation=evaluation, images=scored.images)


def eval_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return eval/<reward>, eval/mean of the totals, and the figures of diversity.

    A figure that no sample has is left out.
    """
    # not the sum of the means: each reward may be asked about prompts of its own
    totals = [sample.total for sample in evaluation.samples if sample.total is not None]
    means = {"mean": estimate(totals).mean}
    means |= {name: evaluation.estimate(name).mean for name in evaluation.reward_names}
    figures: dict[str, float | None] = {**means, **evaluation.diversity}
    return {
        f"eval/{name}": value
        for name, value in figures.items()
        if value is not None and not math.isnan(value)
    }


@dataclass
class _Scored:
    """Samples of one data-parallel rank, or of all.

    figures: prompt id → its figures of diversity, None for one that it has not.
    """

    samples: list[EvaluatedSample] = field(default_factory=list)
    figures: dict[str, dict[str, float | None]] = field(default_factory=dict)
    images: Tensors = field(default_factory=dict)


def _requests(plan: Plan, config: Config, *, policy_version: int | None) -> list[RolloutRequest]:
    """Return requests of at most batch_size samples, longest first: groups of one size together."""
    sampling = eval_sampling(config)
    size = config.rollout.batch_size
    requests = [
        RolloutRequest(
            prompt=prompt,
            sampling=sampling,
            sample_indices=tuple(indices[first : first + size]),
            seed=config.seed,
            step=EVAL_STEP,
            policy_version=policy_version,
        )
        for prompt, indices in plan
        for first in range(0, len(indices), size)
    ]
    # a sort is stable, so samples of one prompt stay in order
    return sorted(requests, key=lambda request: -len(request.sample_indices))


class _Scoring:
    """Sample and score chunk by chunk, with what has been done so far.

    draw_of: makes the draw of a chunk's requests.
    """

    def __init__(
        self,
        draw_of: Callable[[Sequence[RolloutRequest]], Draw],
        requests: Sequence[RolloutRequest],
        scorer: Scorer,
        wanted: set[Identity],
    ) -> None:
        self.scored = _Scored()
        self._scorer = scorer
        self._wanted = wanted
        self._draws = [draw_of(chunk) for chunk in _chunks(requests)]
        self._pending: dict[str, list[RolloutGroup]] = {}  # groups of incomplete prompts
        self._missing = Counter(request.prompt.id for request in requests)

    def run(self) -> bool:
        """Go on with the first chunk that is not done. False where replicas were lost."""
        while self._draws:
            draw = self._draws[0]
            if not draw.run():
                return False
            groups, rewards = draw.result()
            del self._draws[0]
            for index, group in enumerate(groups):
                self._add(group, {name: value[index] for name, value in rewards.items()})
        self._scorer.sleep()
        self._scorer.pop_figures()  # those that are logged are of training steps
        return True

    def use_version(self, version: int) -> None:
        """Keep the version: an evaluation is of one."""

    def _add(self, group: RolloutGroup, rewards_G: Mapping[str, Tensor]) -> None:
        prompt_id = group.prompt.id
        _add(self.scored, group, rewards_G, self._wanted)
        self._pending.setdefault(prompt_id, []).append(group)
        self._missing[prompt_id] -= 1
        # as soon as it can be, since groups hold pixels
        if not self._missing[prompt_id]:
            self.scored.figures[prompt_id] = _figures(self._pending.pop(prompt_id))


def _chunks(requests: Sequence[RolloutRequest]) -> Iterator[list[RolloutRequest]]:
    """Yield runs of requests of one size, with as many samples as may be in memory at once."""
    # _requests() has sorted them by size, as groupby needs it
    for size, same_size in groupby(requests, key=lambda request: len(request.sample_indices)):
        run = list(same_size)
        sampling = run[0].sampling
        num_bytes = 3 * sampling.num_frames * sampling.height * sampling.width
        count = max(1, min(SAMPLES_AT_ONCE, PIXEL_BYTES_AT_ONCE // num_bytes) // size)
        yield from (run[first : first + count] for first in range(0, len(run), count))


def _add(
    scored: _Scored, group: RolloutGroup, rewards_G: Mapping[str, Tensor], wanted: set[Identity]
) -> None:
    prompt = group.prompt
    for row, (index, pixels_FHWC) in enumerate(
        zip(group.sample_indices, group.pixels_GFHWC, strict=True)
    ):
        # JSON has no nan
        values = {
            name: None if value_G[row].isnan() else value_G[row].item()
            for name, value_G in rewards_G.items()
        }
        total = values.pop(TOTAL)
        file = None
        if (prompt.id, index) in wanted:
            file = image_name(prompt.id, index, suffix=picture_suffix(pixels_FHWC))
            # Not a view, which would keep the pixels of its whole group
            scored.images[file] = pixels_FHWC.clone()
        scored.samples.append(
            EvaluatedSample(
                prompt_id=prompt.id,
                sample_index=index,
                caption=prompt.text,
                task=task_of(prompt),
                rewards=values,
                total=total,
                file=file,
            )
        )


def _figures(groups: list[RolloutGroup]) -> dict[str, float | None]:
    """Return the diversity of one prompt's samples; a video's middle frame stands for it.

    Diversity of colour is None where the prompt names a colour.
    """
    indices = torch.tensor([index for group in groups for index in group.sample_indices])
    order = indices.argsort(stable=True)
    frames = torch.cat([group.middle_frames_GHWC for group in groups])[order]
    clean_latents = torch.cat([group.latents_GSLC[:, -1] for group in groups])[order]

    small: np.ndarray = diversity.thumbnails(frames)
    is_named = diversity.names_a_colour(groups[0].prompt.text)
    figures = {
        "colour_entropy_bit": math.nan if is_named else diversity.colour_entropy_bit([small]),
        "latent_spread": diversity.latent_spread(clean_latents),
        "saturation": diversity.saturation(small),
    }

    # JSON has no nan
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _mean_figure(figures: dict[str, dict[str, float | None]], name: str) -> float | None:
    """Return the mean over the prompts that have the figure."""
    # In the order of prompt ids, so that the sum is the same for every layout.
    values = [figures[prompt_id][name] for prompt_id in sorted(figures)]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _gather(scored: _Scored, *, mesh: Mesh) -> _Scored:
    """Return what all data-parallel ranks scored; pictures on rank 0 alone. Collective.

    The ranks' own pictures are gone from `scored` then.
    """
    record = None
    if mesh.is_model_group_source:  # its peers have scored nothing
        record = {
            "samples": [asdict(sample) for sample in scored.samples],
            "figures": scored.figures,
            "shapes": {name: list(pixels.shape) for name, pixels in scored.images.items()},
        }

    gathered = _Scored()
    for source, received in enumerate(gather_json(record, mesh.cpu_group)):
        if received is None:
            continue
        gathered.samples += [EvaluatedSample(**sample) for sample in received["samples"]]
        gathered.figures |= received["figures"]
        images = _to_rank_0(scored.images, received["shapes"], source=source, mesh=mesh)
        gathered.images |= images
    return gathered


def _to_rank_0(
    images: Tensors, shapes: Mapping[str, Sequence[int]], *, source: int, mesh: Mesh
) -> Tensors:
    """Bring pictures of one rank to rank 0, which alone writes them; return them there, else {}.

    From hand to hand: 28 videos of 81 frames at 720 x 1280 are 6 GB, too much for every rank. Only
    rank 0 and the source take part.
    images: this rank's own; those that it sends are taken out. shapes: of the source's.
    """
    if mesh.rank == 0:
        if source == 0:
            return images
        received = {name: torch.empty(*shape, dtype=torch.uint8) for name, shape in shapes.items()}
        for pixels in received.values():
            dist.recv(pixels, src=source, group=mesh.cpu_group)
        return received

    if mesh.rank == source:
        for name in shapes:
            dist.send(images.pop(name).contiguous(), dst=0, group=mesh.cpu_group)
    return {}
