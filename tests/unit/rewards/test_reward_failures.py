"""A sample that could not be scored is left out or ends the run; it never scores 0."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.parallel.collectives import AgreedError
from megadiff.rewards.base import Reward, RewardContext, RewardError, RewardSample, ScoreFailed
from megadiff.rewards.score import Scorer
from megadiff.train.sampling import open_rewards
from megadiff.types import Prompt, RolloutGroup, Sampling
from tests.meshes import one_rank_mesh

MakeGroup = Callable[..., RolloutGroup]
RELEASE = threading.Event()
FAILED = 99


def value_of(sample: RewardSample) -> float:
    return float(sample.pixels[0, 0, 0, 0])


class Gaps(Reward):
    """The grey value; at 99 it fails in one of the ways that a reward may fail."""

    def __init__(self, *, how: str = "none", samples_per_call: int | None = None) -> None:
        self.how = how
        self.samples_per_call = samples_per_call

    def score(self, samples: Sequence[RewardSample]) -> list[float | None]:
        values = [value_of(sample) for sample in samples]
        if FAILED in values and self.how == "raise":
            raise ScoreFailed("http://judge:1 is gone, after 3 tries")
        if FAILED in values and self.how == "hang":
            RELEASE.wait(30)
        if self.how == "nan":
            return [float("nan")] * len(values)
        return [None if value == FAILED else value for value in values]


class Waits(Reward):
    """As a judge does: 0.3 s a call, whatever is in flight."""

    samples_per_call = 1
    most = 0
    running = 0
    lock = threading.Lock()

    def __init__(self, *, workers: int | None) -> None:
        self.workers = workers

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        with Waits.lock:
            Waits.running += 1
            Waits.most = max(Waits.most, Waits.running)
        time.sleep(0.3)
        with Waits.lock:
            Waits.running -= 1
        return [value_of(sample) for sample in samples]


class Model(Reward):
    """Notes when it is loaded, put to sleep and woken."""

    log: list[str] = []

    def __init__(self, *, broken: str = "") -> None:
        self.broken = broken

    def open(self, context: RewardContext) -> None:
        Model.log.append(f"open {context.device} {dict(context.judges)}")
        if self.broken:
            raise OSError(self.broken)

    def sleep(self) -> None:
        Model.log.append("sleep")

    def wake(self) -> None:
        Model.log.append("wake")

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        Model.log.append("score")
        return [0.5] * len(samples)

    def figures(self) -> Mapping[str, float]:
        return {"mass": 0.9}


@pytest.fixture(autouse=True)
def released(scorer: Callable[..., Scorer]) -> Iterator[None]:
    """Calls that hang end before their scorer is closed."""
    RELEASE.clear()
    Model.log.clear()
    yield
    RELEASE.set()


def config(class_name: str, args: dict | None = None, **settings: object) -> RewardConfig:
    return RewardConfig(type=f"{__name__}:{class_name}", args=args or {}, **settings)


def rows(count: int, *, failed: int) -> list[list[int]]:
    """`count` groups of four; the first sample of the first `failed` groups is not scored."""
    return [[FAILED if index < failed else 1, 2, 3, 4] for index in range(count)]


@pytest.mark.parametrize("how, gone", [("none", 1), ("raise", 4), ("hang", 4)])
def test_drop_leaves_out_what_failed(
    scorer: Callable[..., Scorer], make_group: MakeGroup, how: str, gone: int
) -> None:
    """A whole call where it raised or hung, one sample where that alone has no score."""
    settings = {"timeout_s": 0.3} if how == "hang" else {}
    judge = scorer(judge=config("Gaps", {"how": how}, on_failure="drop", **settings))
    groups = [make_group(row, f"red {index}") for index, row in enumerate(rows(20, failed=1))]
    result = judge.score(groups)
    assert int(result["total"].isnan().sum()) == gone
    assert torch.equal(result["judge"].isnan(), result["total"].isnan())
    assert result["judge"][0, 0].isnan() and not (result["judge"] == 0).any()
    assert result["total"][1:].tolist() == [[1.0, 2, 3, 4]] * 19
    assert judge.pop_figures()["judge"]["dropped"] == gone
    assert judge.pop_figures()["judge"]["dropped"] == 0


@pytest.mark.parametrize("how", ["none", "raise"])
def test_stop_ends_the_run(scorer: Callable[..., Scorer], make_group: MakeGroup, how: str) -> None:
    judge = scorer(judge=config("Gaps", {"how": how}))
    with pytest.raises(RewardError, match=r"'judge' .*sample") as caught:
        judge.score([make_group([1, FAILED], "a red fox")])
    wanted = {"none": "on_failure=drop", "raise": "http://judge:1 is gone, after 3 tries"}
    assert wanted[how] in str(caught.value)


@pytest.mark.parametrize("failed, how", [(2, "raise"), (5, "none")])
def test_too_many_failures_stop_in_any_case(
    scorer: Callable[..., Scorer], make_group: MakeGroup, failed: int, how: str
) -> None:
    judge = scorer(judge=config("Gaps", {"how": how}, on_failure="drop"))
    groups = [make_group(row) for row in rows(20, failed=failed)]
    with pytest.raises(RewardError, match=r"failed on \d+ of 80 samples.*5%"):
        judge.score(groups)


def test_a_call_that_fails_alone_ends_the_run_when_it_fails_again(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    """A rank may have one group a step, and the end of an evaluation may be one sample."""
    judge = scorer(judge=config("Gaps", {"how": "raise"}, on_failure="drop"))
    fails = make_group([FAILED, 2])
    for _ in range(2):
        assert judge.score([fails])["total"].isnan().all()
        for _ in range(9):
            assert judge.score([make_group([1, 2])])["total"].tolist() == [[1.0, 2.0]]
    judge.score([fails])
    judge.score([make_group([1, 2])])
    with pytest.raises(RewardError, match="failed on 2 of 2 samples.*5%, and one of 10 steps'"):
        judge.score([fails])


@pytest.mark.parametrize("name", ["my reward", "größe", "a/b", "mean", "saturation", "total"])
def test_names_that_cannot_be_logged_are_refused(scorer: Callable[..., Scorer], name: str) -> None:
    with pytest.raises(ValueError, match=rf"reward\.{name}: .*(rename|letters from a to z)"):
        scorer(**{name: config("Model")})


def test_a_nan_is_a_bug_whatever_on_failure_says(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    judge = scorer(judge=config("Gaps", {"how": "nan"}, on_failure="drop", weight=0.0))
    with pytest.raises(RewardError, match="nan"):
        judge.score([make_group([1, 2])])


def test_a_reward_that_is_only_watched_never_ends_the_run(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    both = scorer(
        judge=config("Gaps", {"how": "raise"}, weight=0.0), trained=config("Gaps", weight=1.0)
    )
    result = both.score([make_group([FAILED - 1, 3])])
    assert result["total"].tolist() == [[98.0, 3.0]]
    watched = scorer(
        judge=config("Gaps", {"how": "raise"}, weight=0.0), trained=config("Model", weight=2.0)
    )
    result = watched.score([make_group([FAILED, 3])])
    assert result["judge"].isnan().all() and result["total"].tolist() == [[1.0, 1.0]]


def test_calls_behind_one_that_hangs_are_made(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    """Both shared threads are lost to it, and calls are left."""
    settings = {"on_failure": "drop", "timeout_s": 0.3}
    judge = scorer(judge=config("Gaps", {"how": "hang", "samples_per_call": 1}, **settings))
    row = [FAILED, FAILED] + [1] * 46
    result = judge.score([make_group(row)])
    assert result["total"][0, 2:].tolist() == [1.0] * 46


def test_a_reward_that_waits_has_threads_of_its_own(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    """Sixteen calls at once on two shared threads' machine, and the cheap reward beside them."""
    Waits.most = 0
    both = scorer(judge=config("Waits", {"workers": 16}), cheap=config("Gaps"))
    result = both.score([make_group(list(range(16)))])
    assert Waits.most == 16
    assert result["total"].tolist() == [[2.0 * value for value in range(16)]]


def test_prompts_are_routed_by_their_columns(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    both = scorer(
        text=config("Gaps", only={"task": "ocr"}),
        place=config("Model", weight=2.0, only={"task": ["count", "place"]}),
    )
    groups = []
    for index, task in enumerate(["ocr", "count", "place"]):
        group = make_group([3, 4], f"red {index}")
        groups.append(replace(group, prompt=replace(group.prompt, fields={"task": task})))
    both.validate([group.prompt for group in groups])
    result = both.score(groups)
    assert result["text"].isnan().tolist() == [[False] * 2, [True] * 2, [True] * 2]
    assert result["total"].tolist() == [[3.0, 4.0], [1.0, 1.0], [1.0, 1.0]]
    assert both.pop_figures()["text"]["dropped"] == 0


def test_routes_that_lead_nowhere(scorer: Callable[..., Scorer]) -> None:
    ocr = Prompt(text="a sign", id="0", fields={"task": "ocr"})
    other = Prompt(text="two dogs", id="1", fields={"task": "count"})
    routed = scorer(text=config("Gaps", only={"task": "ocr"}), seen=config("Model", weight=0.0))
    routed.validate([ocr])
    with pytest.raises(ValueError, match=r"no reward with a weight applies to prompt 'two dogs'"):
        routed.validate([ocr, other])
    misspelt = scorer(text=config("Gaps", only={"tsak": "ocr"}))
    with pytest.raises(ValueError, match=r"2 prompts has the column 'tsak'.*'task'"):
        misspelt.validate([ocr, other])
    unused = scorer(text=config("Gaps", only={"task": "orc"}), seen=config("Model"))
    with pytest.raises(ValueError, match=r"'orc'.* applies to none of 1 prompts; .*'ocr'"):
        unused.validate([ocr])


def test_models_are_loaded_once_and_sleep_between_steps(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    model = scorer(model=config("Model"))
    assert Model.log == []  # not by the constructor, which --dry-run calls as well
    model.open(RewardContext(device=torch.device("cpu"), judges={"qwen": ["http://a:1"]}))
    model.sleep()
    for _ in range(2):
        model.score([make_group([1]), make_group([2])])
        model.sleep()
        model.sleep()
    opened = "open cpu {'qwen': ['http://a:1']}"
    step = ["wake", "score", "score", "sleep"]
    assert Model.log == [opened, "sleep", *step, *step]
    assert model.pop_figures()["model"]["mass"] == 0.9


def test_a_model_that_does_not_load_is_named(scorer: Callable[..., Scorer]) -> None:
    broken = scorer(model=config("Model", {"broken": "no weights"}))
    with pytest.raises(RewardError, match=r"reward 'model' failed in open\(\): no weights"):
        broken.open(RewardContext(device=torch.device("cpu")))


class Figures(Model):
    """Logs what it is given."""

    def __init__(self, *, figures: object) -> None:
        super().__init__()
        self.own = figures

    def figures(self) -> Mapping[str, float]:
        return self.own  # type: ignore[return-value]


def test_own_figures_become_floats(scorer: Callable[..., Scorer]) -> None:
    own = {"numpy": np.float32(0.5), "tensor": torch.tensor(0.25), "count": 3}
    figures = scorer(good=config("Figures", {"figures": own})).pop_figures()["good"]
    assert json.loads(json.dumps(figures)) == {
        "seconds": 0.0,
        "dropped": 0.0,
        "numpy": 0.5,
        "tensor": 0.25,
        "count": 3.0,
    }


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"loss": torch.zeros(2)}, "reward 'bad' failed in 'loss' of figures"),
        ({"text": "9 of 10"}, "reward 'bad' failed in 'text' of figures.*'9 of 10'"),
        ({"hit rate": 1}, "reward 'bad' failed in 'hit rate' of figures.*letters from a to z"),
        (None, "reward 'bad' failed in figures.*return a dict of one number a name"),
    ],
)
def test_own_figures_that_are_no_numbers_name_the_reward_before_the_first_rollout(
    scorer: Callable[..., Scorer], own: object, words: str
) -> None:
    bad = scorer(bad=config("Figures", {"figures": own}))
    bad.validate([Prompt(text="two dogs", id="0")])
    sampling = Sampling(height=8, width=8, num_inference_steps=4)
    with pytest.raises(AgreedError, match=words):
        open_rewards(bad, {}, sampling, mesh=one_rank_mesh())


class Strings(Reward):
    def score(self, samples: Sequence[RewardSample]) -> list[str]:  # type: ignore[override]
        return ["9 of 10"] * len(samples)


@pytest.mark.parametrize("on_failure", ["stop", "drop"])
def test_every_reward_is_tried_before_the_first_rollout(
    scorer: Callable[..., Scorer], on_failure: str
) -> None:
    """With a prompt that it is asked about; nothing of it is collected or counted."""
    prompts = [Prompt(text="two dogs", id="0", fields={"task": "count"})]
    prompts.append(Prompt(text="a sign", id="1", fields={"task": "ocr"}))
    grey = np.full((1, 8, 8, 3), 128, np.uint8)
    good = scorer(model=config("Model"), text=config("Gaps", only={"task": "ocr"}))
    good.validate(prompts)
    good.try_out(grey)
    assert good.pop_figures()["text"] == {"seconds": 0.0, "dropped": 0.0}
    bad = scorer(
        model=config("Model"),
        text=config("Strings", only={"task": "ocr"}, on_failure=on_failure),
    )
    bad.validate(prompts)
    with pytest.raises(RewardError, match=r"'text' .*'a sign' returned '9 of 10'"):
        bad.try_out(grey)
    failed = np.full((1, 8, 8, 3), FAILED, np.uint8)
    silent = scorer(judge=config("Gaps", on_failure=on_failure))
    silent.validate(prompts)
    silent.try_out(failed)  # a grey picture may leave a judge without words
    broken = scorer(judge=config("Gaps", {"how": "raise"}, on_failure=on_failure))
    broken.validate(prompts)
    with pytest.raises(RewardError, match=r"'judge'.* after 3 tries"):
        broken.try_out(failed)


def test_drop_counts_a_whole_step_and_warns_once(
    scorer: Callable[..., Scorer], make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Two failures in the first group are 2 of 512, also while that alone has been submitted."""
    judge = scorer(judge=config("Gaps", {"samples_per_call": 1}, on_failure="drop"))
    judge.submit(make_group([FAILED, FAILED] + [1] * 14))
    while judge._workers[""]._queue.qsize():
        time.sleep(0.01)
    for _ in range(31):
        judge.submit(make_group([1] * 16))
    assert int(judge.collect()["total"].isnan().sum()) == 2
    (warning,) = [record for record in caplog.records if "left out" in record.message]
    assert "2 of 512" in warning.message


def test_a_model_with_one_thread_that_hangs_ends_the_run(
    scorer: Callable[..., Scorer], make_group: MakeGroup
) -> None:
    """A second thread beside it would use the same weights, which sleep() moves."""
    judge = scorer(judge=config("Gaps", {"how": "hang"}, on_failure="drop", timeout_s=0.3))
    judge.rewards["judge"].workers = 1
    with pytest.raises(RewardError, match="took longer than timeout_s"):
        judge.score([make_group([FAILED, 1]), make_group([1, 2]), make_group([1, 2])])
