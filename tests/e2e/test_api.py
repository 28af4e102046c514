"""The functions for notebooks, in one process, as a notebook's kernel is one."""

import json
import logging
import os
import re
import runpy
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from megadiff import Replica, evaluate, load_config, score, train
from megadiff.rewards.color import ColorReward
from megadiff.train.stop import SIGNALS
from tests.distributed.ranks import run_command
from tests.e2e.servers import ENVIRONMENT, ROOT


class InterruptingReward(ColorReward):
    """Presses Ctrl-C while the samples of a step are scored."""

    def score(self, samples):
        is_trial = samples[0].pixels.std() == 0  # a grey picture, before training begins
        if "interrupt" in os.environ and not is_trial:
            del os.environ["interrupt"]
            signal.raise_signal(signal.SIGINT)
        return super().score(samples)


def draws(config):
    """Equal calls give equal samples, a repeated prompt others, and rewards score them."""
    with Replica(config) as replica:
        groups = replica.sample(["a red cat", "a blue dog", "a red cat"], num_samples=2)
        again = replica.sample(["a red cat"], num_samples=2)
        other = replica.sample(["a red cat"], num_samples=2, seed=7)
        explored = replica.sample(["a red cat"], explore=True)
        with pytest.raises(ValueError, match="open already"):
            replica.__enter__()
        (cat,) = replica.sample("a red cat", num_samples=2)
        with pytest.raises(ValueError, match="num_samples=0 < 1"):
            replica.sample(["a red cat"], num_samples=0)
    with pytest.raises(ValueError, match="not open"):
        replica.sample(["a red cat"])

    pixels = [group.pixels_GFHWC for group in (*groups, *again, *other)]
    assert pixels[0].shape == (2, 1, 64, 64, 3) and pixels[0].dtype == torch.uint8
    assert torch.equal(pixels[3], cat.pixels_GFHWC)
    # In a batch with others: some CPUs then add up in another order, 5e-7 of a latent.
    assert (pixels[0].int() - pixels[3].int()).abs().max() <= 1
    assert not any(torch.equal(pixels[0], pixels[index]) for index in (1, 2, 4))
    assert explored[0].log_probs_GW.shape == (1, 2) and groups[0].log_probs_GW.shape == (2, 0)

    rewards = score(groups, config.reward)
    assert rewards["total"].shape == (3, 2) and rewards["total"].isfinite().all()
    for names in (["jpeg_size"], "jpeg_size"):
        assert torch.equal(score(groups, names)["jpeg_size"], rewards["size"])
    for wrong, sizes in (([], []), ([*groups, *explored], [1, 2])):
        with pytest.raises(ValueError, match=re.escape(f"groups of sizes {sizes}, need at least")):
            score(wrong, "jpeg_size")


def trains(config):
    """A run, the same run further, one that is asked to stop, and one that Ctrl-C ends."""
    before = [signal.getsignal(number) for number in SIGNALS]
    folder = train(config)
    config.train.num_steps = 1000
    (folder / "stop").write_text("")
    with pytest.raises(RuntimeError, match="asked to stop"):
        train(config)
    # before its first step, or after it
    config.train.num_steps = len((folder / "metrics.jsonl").read_text().splitlines()) + 1
    os.environ["interrupt"] = "1"
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert train(config) == folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, config.train.num_steps + 1))
    assert len(rows) < 5

    config.optim.lr = -1.0
    with pytest.raises(ValueError, match="optim.lr=-1"):
        train(config)
    config.parallel.sp = 8
    with pytest.raises(ValueError, match="launch/torchrun.sh 8"):
        train(config)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        config.parallel.sp = 1
        pool.submit(train, config).result()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def session(arguments):
    """A kernel's life: what the test below says of each call, one after the other."""
    logging.basicConfig(level="INFO")
    config = load_config(*arguments)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(draws, config).result()
    trains(config)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        evaluate("nowhere", rewards=["color"], num_samples=3)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        Replica("nowhere")
    return 0


def test_a_session_samples_trains_twice_and_survives_its_errors(trainer, registry):
    keys = [
        "train.num_steps=1",
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        "checkpoint.every=1",
        f"reward.color.type={__name__}:InterruptingReward",
        "reward.size.type=jpeg_size",
    ]
    arguments = trainer.command(*keys)[3:]
    done = run_command(session, arguments, folder=trainer.folder, environment=ENVIRONMENT)
    assert done.code == 0, done.stderr


def run_notebook(arguments):
    os.environ["NOTEBOOK_OUT"] = arguments[0]
    sys.argv = ["ipykernel_launcher.py", "-f", "kernel.json"]  # as Jupyter has it
    runpy.run_path(str(ROOT / "examples" / "notebook.py"), run_name="__main__")
    return 0


def test_the_notebook_draws_scores_and_writes_a_picture(tmp_path):
    picture = tmp_path / "notebook.png"
    done = run_command(run_notebook, [str(picture)], folder=ROOT, environment=ENVIRONMENT)
    assert done.code == 0, done.stderr
    shares = [int(line.split("%")[0]) for line in done.stdout.splitlines()[:-1]]
    assert len(shares) == 3 and sum(shares) > 100, done.stdout  # the model draws half of them right
    assert Image.open(picture).size == (8 * 64, 3 * 64)
