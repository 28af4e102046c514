"""Do from a notebook what the commands do: the same code, with exceptions for exit codes.

`from megadiff import load_config, train, evaluate, score, Replica`. Nothing here configures
logging: logging.basicConfig(level="INFO") shows what the commands show.
"""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megadiff.cli import evaluate as evaluate_command
from megadiff.cli.evaluate import Evaluated, connect_replicas, one_rank_mesh
from megadiff.cli.evaluate_subject import Subject, checked_adapter, config_of, named_rewards
from megadiff.cli.train import train_rank
from megadiff.config.load import load_config as load_arguments
from megadiff.config.rewards import RewardConfig
from megadiff.config.schema import Config
from megadiff.data.prompts import prompt_id
from megadiff.parallel.mesh import world_size_from_env
from megadiff.rewards.base import RewardContext
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.train.evaluate import EVAL_STEP, eval_sampling
from megadiff.train.judges import Judges
from megadiff.train.run import run_folder
from megadiff.train.sampling import for_replica, sampling_of
from megadiff.train.stop import SIGNALS
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Tensors


def load_config(*arguments: str | Path) -> Config:
    """Merge yaml files and key=value overrides from left to right, as the command line does.

    Raises ConfigError, a ValueError, with the key and what would be right.
    """
    return load_arguments([str(argument) for argument in arguments])


def train(config: Config) -> Path:
    """Train in this process, as `megadiff train` does with one rank; return the run's folder.

    An earlier run in that folder goes on. Signals are the run's meanwhile: Ctrl-C, or a notebook's
    interrupt, saves the last finished step and raises KeyboardInterrupt. Another one meanwhile
    changes nothing.
    Raises ValueError for a wrong config, for one of several ranks and outside the main thread,
    RuntimeError for a run that was asked to stop, and what the run itself raises.
    """
    _check_one_rank(config)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"train() was called in the thread {threading.current_thread().name!r}, but Python "
            "hands signals, which save a run, to the main thread only; call it there, or start "
            "`megadiff train` as a process"
        )

    with _own_signals():
        try:
            train_rank(config, world_size=1, ends_process=False)
        except SystemExit as stop:
            if stop.code == 128 + signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RuntimeError(
                f"the run in {run_folder(config)} was asked to stop (exit code {stop.code}); "
                "call train() again to go on"
            ) from None

    return run_folder(config)


def evaluate(
    target: str | Path,
    *arguments: str | Path,
    prompts: str | Path | None = None,
    rewards: str | Sequence[str] = (),
    num_samples: int | None = None,
    baseline: str | Path | None = None,
    out: str | Path | None = None,
    force: bool = False,
) -> Evaluated:
    """Score a model's or a run's folder, as `megadiff evaluate` does with the same options.

    arguments: yaml files and key=value overrides. baseline: a second folder to compare with.
    force: replace what an earlier evaluation left in `out`.
    Raises ValueError for what cannot be evaluated, and AgreedError or OSError where a replica or a
    reward failed.
    """
    options: dict[str, object] = {
        "--prompts": prompts,
        "--num-samples": num_samples,
        "--baseline": baseline,
        "--out": out,
    }
    argv = [str(target), *map(str, arguments)]
    argv += [f"{flag}={value}" for flag, value in options.items() if value is not None]
    argv += [f"--reward={name}" for name in _listed(rewards)]
    argv += ["--force"] if force else []

    try:
        parsed = evaluate_command.parse(argv)
    except SystemExit:
        raise ValueError(
            f"`megadiff evaluate` refuses {argv}; its parser says why on stderr"
        ) from None

    return evaluate_command.evaluate_target(*parsed)


def score(
    groups: Sequence[RolloutGroup], rewards: str | Sequence[str] | Mapping[str, RewardConfig]
) -> Tensors:
    """Score samples: reward name → [P, G] float32, and their weighted sum under "total".

    groups: of Replica.sample(), of one size. rewards: a config's `reward`, or types such as color
    and module:Class. NaN is the score of a sample that has none.
    Raises ValueError for a prompt that a reward cannot score, for groups of several sizes and for
    two rewards of one name,
    RewardError where one fails.
    """
    sizes = sorted({len(group.sample_indices) for group in groups})
    if len(sizes) != 1:
        raise ValueError(
            f"{len(groups)} groups of sizes {sizes}, need at least 1 and of one size; score those "
            "of each size by a call of its own"
        )
    if not isinstance(rewards, Mapping):
        rewards = named_rewards(_listed(rewards), {})

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with closing(Scorer(rewards)) as scorer:
        scorer.validate([group.prompt for group in groups])
        scorer.open(RewardContext(device=device))
        for group in groups:
            scorer.submit(group)
        return scorer.collect()


class ReplicaSession:
    """Run a replica of a model, of a run or of a config, from `with` to its end.

    `with Replica("assets/shapes") as replica: groups = replica.sample(["a red star"])`
    It may be opened in any thread, several at a time, and again in the same process.
    """

    def __init__(self, source: str | Path | Config, *arguments: str | Path) -> None:
        """Resolve what is served; nothing is started.

        source: a diffusers folder, a run's folder, whose newest checkpoint is taken, or a config,
        of which the model is served. With rollout.mode=separate a running one is found instead.
        arguments: yaml files and key=value overrides, over a folder's own settings.
        Raises ValueError for what cannot be served.
        """
        if isinstance(source, Config):
            if arguments:
                raise ValueError(
                    f"{len(arguments)} arguments beside a Config; give them to load_config()"
                )
            target = Path(source.model.path)
            config = _alone(source)
        else:
            target = Path(source)
            config = config_of(target, [str(argument) for argument in arguments])

        self.config = config
        self._target = target
        self._adapter = checked_adapter(config)
        self._stack: ExitStack | None = None

    def __enter__(self) -> ReplicaSession:
        """Start the replica, and return when it is healthy: seconds, or minutes for large models.

        Raises AgreedError with the end of its log when it does not come up.
        """
        if self._stack is not None:
            raise ValueError("this replica is open already; make another one")

        with ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="megadiff_replica_"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            subject = Subject(
                target=self._target, config=self.config, adapter=self._adapter, folder=folder
            )
            mesh = one_rank_mesh(subject)
            judges = Judges([], {}, mesh, self.config)
            connection, _ = connect_replicas(subject, mesh, judges, stack)
            self._fleet = connection.fleet
            self._stack = stack.pop_all()

        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the replica. Without effect on one that is closed."""
        stack = self._stack
        self._stack = None
        if stack is not None:
            stack.close()

    def sample(
        self,
        prompts: str | Sequence[str | Prompt],
        *,
        num_samples: int = 1,
        seed: int | None = None,
        explore: bool = False,
    ) -> list[RolloutGroup]:
        """Draw num_samples of every prompt; equal calls give equal samples.

        A group's images are its pixels_GFHWC: uint8, [samples, frames, height, width, 3].
        seed: by default the config's. explore: with the rollout's stochastic window, as training
        draws, in place of Euler's ODE steps alone.
        Raises ValueError for a replica that is not open, ReplicaDied for one that is gone.
        """
        if self._stack is None:
            raise ValueError("the replica is not open; use it inside `with Replica(…) as replica:`")
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} < 1; draw at least one of every prompt")

        sampling = sampling_of(self.config.rollout) if explore else eval_sampling(self.config)
        repeats: Counter[str] = Counter()
        requests = []

        for prompt in map(_prompt, _listed(prompts)):
            # a prompt that comes again draws other noise
            first = repeats[prompt.id] * num_samples
            repeats[prompt.id] += 1
            requests.append(
                RolloutRequest(
                    prompt=prompt,
                    sampling=sampling,
                    sample_indices=tuple(range(first, first + num_samples)),
                    seed=self.config.seed if seed is None else seed,
                    step=EVAL_STEP,
                )
            )
        self._adapter.check_prompts([request.prompt for request in requests])

        return self._draw(requests)

    def _draw(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        asked = [for_replica(request, self._adapter) for request in requests]
        groups = {
            index: replace(group, prompt=requests[index].prompt)
            for index, group in self._fleet.generate(asked)
        }
        if len(groups) < len(requests):
            why = "; ".join(loss.reason for loss in self._fleet.lost.values())
            raise ReplicaDied(
                f"{len(groups)} of {len(requests)} prompts were drawn, then no replica was left "
                f"({why}); close this one and open another"
            )

        return [groups[index] for index in range(len(requests))]


def _listed(names: str | Sequence[Any]) -> Sequence[Any]:
    """Take one name for a list of it, and not for a list of letters."""
    return [names] if isinstance(names, str) else names


def _check_one_rank(config: Config) -> None:
    parallel = config.parallel
    wanted = max(1, parallel.dp) * parallel.sp * parallel.tp
    num_ranks = max(world_size_from_env(), wanted)
    if num_ranks > 1:
        raise ValueError(
            f"{num_ranks} ranks are asked for, and train() is one: in this process; start several "
            f"with launch/torchrun.sh {num_ranks} CONFIG.yaml"
        )


def _alone(config: Config) -> Config:
    """Return the config of a replica without a trainer."""
    parallel = replace(config.parallel, dp=0, dp_replicate=1, sp=1, tp=1)
    lora = replace(config.lora, shared_base="never")
    sync = replace(config.sync, folder="")  # a run may be writing there
    return replace(config, parallel=parallel, lora=lora, sync=sync)


def _prompt(prompt: str | Prompt) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if not prompt.strip():
        raise ValueError("a prompt is empty; give it text")
    return Prompt(text=prompt, id=prompt_id(prompt, Prompt.negative_text))


@contextmanager
def _own_signals() -> Iterator[None]:
    """Let a run have the signals, and give them back with all that a run leaves of its own."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)  # a notebook's event loop has one
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # else it is C code's, and nobody has changed it
                signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # what freeze_startup_objects() kept from the collector for the run's time
        gc.unfreeze()
