"""Typos and wrong types are refused with the full key; every shipped config loads."""

import re
from pathlib import Path

import pytest

from megadiff.algorithms import build_algorithm
from megadiff.config.load import (
    ConfigError,
    all_keys,
    load_config,
    save_config,
    to_dict,
)
from megadiff.config.synonyms import SYNONYMS
from megadiff.config.validate import _check_rollout, sleeps, validate
from megadiff.data.prompts import load_prompts
from megadiff.train.check_algorithm import check_algorithm
from tests.shipped import shipped_files

ROOT = Path(__file__).parents[3]
BASE = """
run: {name: test}
model: {path: model}
data: {prompts: prompts.txt}
train: {num_steps: 3, prompts_per_step: 4}
algorithm: {group_size: 4}
rollout: {height: 64, width: 64}
optim: {lr: 1e-4}
reward: {color: {type: color}}
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


def test_files_left_to_right_then_overrides(base, tmp_path):
    second = tmp_path / "second.yaml"
    second.write_text("train: {num_steps: 5}\noptim: {lr: 1e-3}")
    config = load_config(
        [base, str(second), "optim.lr=2e-5", "rollout.sde_window_range=[1,4]", "track=[]"]
    )
    assert (config.train.num_steps, config.optim.lr) == (5, 2e-5)
    assert config.rollout.sde_window_range == [1, 4] and config.track == []
    assert config.algorithm.clip_range == 1e-4  # the schema's default


def test_saved_config_loads_to_the_same(base, tmp_path):
    config = load_config([base, "reward.ocr.type=ocr", "reward.ocr.args.frame_stride=2"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config([str(tmp_path / "saved.yaml")]) == config
    assert to_dict(config)["reward"]["ocr"]["args"] == {"frame_stride": 2}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.num_step=3", "unknown key train.num_step; did you mean train.num_steps"),
        ("lr=3", "unknown key lr; did you mean optim.lr"),
        (
            "train.expert_balance=equal",
            "unknown key train.expert_balance; it is now train.component_weighting, with the same",
        ),
        ("rollout.expert_windows=any", "it is now rollout.component_windows, with the same values"),
        (
            "algorithm.global_std=false",
            "it is now algorithm.advantage: true is global, false is group",
        ),
        ("optim.learning_rate=1e-4", "unknown key optim.learning_rate; here it is optim.lr"),
        ("train.batch_size=8", "here it is train.prompts_per_step, each with algorithm.group_size"),
        ("epochs=8", "here it is train.num_steps"),
        ("reward.colour=null", "reward.colour is null, .* has color; did you mean reward.color?"),
        ("judge.qwen=null", "judge.qwen is null, which removes it, .* has none; leave it out"),
        ("reward.color.wieght=2", "did you mean reward.color.weight"),
        ("train.num_steps=abc", "train.num_steps='abc' is no whole number; give one that is ≥ 0"),
        ("train.num_steps=3.5", "train.num_steps='3.5' is no whole number; give one"),
        ("optim.lr=fast", "optim.lr='fast' is no number; give one that is > 0 and ≤ 10"),
        ("reward.color.weight=big", "reward.color.weight='big' is no number; give one"),
        ("seed=1.5", "seed='1.5' is no whole number"),
        ("optim.lr=[1]", "optim.lr"),
        ("train=3", "train=3"),
        ("reward.ocr.weight=1", "missing reward.ocr.type"),
        ("missing.yaml", "no config file missing.yaml"),
        ("=3", "not a config key"),
        ("train.num_steps=[3", "not valid"),
        ("run.name=null", "run.name"),
    ],
)
def test_mistakes_are_named(base, override, text):
    with pytest.raises(ConfigError, match="(?s)" + text.replace("[", r"\[")):
        load_config([base, override])


def test_a_run_in_place_of_its_config_is_told(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match=f"{tmp_path} is a run, .*: give {tmp_path}/config.yaml"):
        load_config([str(tmp_path)])


def test_a_long_setting_is_no_file(base):
    targets = [f"blocks.{index}.attn.to_q" for index in range(20)]
    config = load_config([base, f"lora.targets=[{','.join(targets)}]"])
    assert list(config.lora.targets) == targets


def test_null_removes_a_reward_that_an_earlier_layer_brought(base, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("reward: {color: null, text: {type: ocr}}")
    assert list(load_config([base, str(mine)]).reward) == ["text"]

    again = load_config([base, "reward.color.weight=3", "reward.color=null", "reward.color.type=x"])
    assert (again.reward["color"].type, again.reward["color"].weight) == ("x", 1.0)

    with pytest.raises(ConfigError, match="no reward is configured"):
        validate(load_config([base, "reward.color=null"]), dp=1)


def test_paths_are_relative_to_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/mine.yaml").write_text(BASE)
    (tmp_path / "prompts.txt").write_text("a cat\n\n# a hash\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(["configs/mine.yaml"])
    prompts = load_prompts(config.data.prompts, max_chars=config.data.max_prompt_chars)
    assert [prompt.text for prompt in prompts] == ["a cat", "# a hash"]


def test_synonyms_are_no_keys_and_lead_to_some():
    # train.batch_size is nobody's key, though rollout.batch_size is one.
    leaves = {key.rpartition(".")[2] for key in all_keys() if key != "rollout.batch_size"}
    assert not leaves & set(SYNONYMS)
    for advice in SYNONYMS.values():
        dotted = re.findall(r"[a-z]+\.[a-z_0-9]+", advice)
        assert set(dotted or [advice]) <= set(all_keys()), advice


def test_what_the_user_must_give(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="missing model.path, optim.lr, rollout.height"):
        load_config([str(tmp_path / "empty.yaml")])
    (tmp_path / "torn.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid yaml"):
        load_config([str(tmp_path / "torn.yaml")])
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="not a mapping"):
        load_config([str(tmp_path / "list.yaml")])


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "train.prompts_per_step=6",
            r"train.prompts_per_step=6 is not a multiple of dp=4.*set .*=8",
        ),
        (
            "train.updates_per_step=3",
            r"group_size=4 is not a multiple of train.updates_per_step=3.*=6",
        ),
        ("rollout.sde_type=sde", r"rollout.sde_type='sde' is not one of flow_sde"),
        ("algorithm.group_size=1", r"algorithm.group_size=1 < 2"),
        ("optim.lr=0", r"optim.lr=0.0 <= 0; set optim.lr>0"),
        ("optim.lr=nan", r"optim.lr=nan is not a finite number"),
        ("rollout.mode=separate", r"rollout.registry"),
        (
            "train.staleness=1",
            r"train.staleness=1 with rollout.mode=colocated.*set rollout.mode=separate, or ",
        ),
        ("train.staleness=2", r"train.staleness=2 > 1; set train.staleness<=1"),
        ("rollout.sde_window_range=[1]", r"has 1 numbers, not 2"),
        ("rollout.ode_solver=heun", r"rollout.ode_solver='heun' is not one of euler, dpm2"),
        ("rollout.sde_window_moves=-1", r"rollout.sde_window_moves=-1 < 0"),
        ("eval.every=5", r"eval.prompts is empty"),
        ("data.prompts=''", r"flow_grpo needs data.prompts"),
        (
            "optim={lr: 1.0, schedule: cosine, warmup_steps: 3}",
            r"optim.warmup_steps=3 >= 3 optimizer steps.*set optim.warmup_steps<3, or .*=constant",
        ),
        ("optim.schedule=step", r"optim.schedule='step' is not one of constant, cosine, linear"),
        ("algorithm.advantage=sum", r"'sum' is not one of global, group, none, gdpo"),
        ("algorithm.caption_drop=1.5", r"algorithm.caption_drop=1.5 > 1"),
        ("engine.backend=deepspeed", r"engine.backend='deepspeed' is not one of veomni, megatron"),
        (
            "parallel.tp=2",
            (
                r"parallel.tp=2 with engine.backend=veomni.*set parallel.tp=1, or "
                r"engine.backend=megatron"
            ),
        ),
        (
            "engine={backend: megatron, fp8: hybrid, dtype: bfloat16}",
            r"engine.fp8=hybrid is now engine.fp8=tensorwise; set engine.fp8=tensorwise",
        ),
        ("engine.fp8=blockwise", r"'blockwise' is not one of none, tensorwise, rowwise"),
        (
            "engine={backend: megatron, fp8: rowwise, dtype: bfloat16}",
            r"engine.fp8=rowwise with engine.backend=megatron.*set engine.fp8=tensorwise, or",
        ),
        (
            "engine={fp8: tensorwise, dtype: float32}",
            r"engine.fp8=tensorwise with engine.dtype=float32",
        ),
        ("rollout={sleep: true}", "rollout.sleep='True' is not one of auto, always, never"),
        (
            "engine.activation_memory_budget=-0.1",
            r"engine.activation_memory_budget=-0.1 < 0; set .*>=0",
        ),
        (
            "engine.activation_memory_budget=2",
            r"engine.activation_memory_budget=2.0 > 1; set .*<=1",
        ),
        (
            "algorithm.old_log_prob=replica",
            r"old_log_prob='replica' is not one of rollout, recompute, auto",
        ),
        ("lora.rank=-1", r"lora.rank=-1 < 0"),
        ("lora.rank=513", r"lora.rank=513 > 512; set lora.rank<=512"),
        ("lora={rank: 4, alpha: -8}", r"lora.alpha=-8.0 < 0"),
        ("lora={rank: 4, alpha: nan}", r"lora.alpha=nan is not a finite number"),
        ("lora.alpha=8", r"lora.alpha=8.0 with lora.rank=0.*set lora.rank, or lora.alpha=0"),
        ("lora.targets=[to_q]", r"lora.targets=\['to_q'\] with lora.rank=0.*or lora.targets=\[\]"),
        ("lora.exclude=[to_q]", r"lora.exclude=\['to_q'\] with lora.rank=0"),
        ("lora.start=folder", r"lora.start=folder with lora.rank=0.*set lora.rank, or lora.start="),
    ],
)
def test_rules_between_keys(base, override, text):
    config = load_config([base, override])
    with pytest.raises(ConfigError, match=text):
        validate(config, dp=4, on_policy=build_algorithm(config.algorithm).on_policy)


@pytest.mark.parametrize("key", ["same_noise=true", "sde_window_moves=5"])
def test_without_a_window_nothing_shares_noise_or_moves(base, key):
    config = load_config([base, f"rollout.{key}"])
    validate(config, dp=1)
    config.rollout.sde_window_size = 0
    with pytest.raises(ConfigError, match="with rollout.sde_window_size=0: .*sde_window_size=2"):
        _check_rollout(config)


def test_what_rl_and_schedules_may_have(base):
    validate(load_config([base, "algorithm.ema_decay=0.9", "algorithm.advantage=gdpo"]), dp=1)
    warm = [base, "optim.warmup_steps=3", "optim.schedule=linear"]
    validate(load_config([*warm, "train.updates_per_step=2"]), dp=1)  # the fall has three updates
    validate(load_config([*warm, "train.num_steps=0"]), dp=1)  # no update at all


def test_a_judge_does_not_sleep_while_samples_are_drawn_ahead(base):
    ahead = "train.staleness=1 rollout.mode=separate rollout.registry=folder".split()
    judge = ["judge.vl.model=folder", "judge.vl.sleep=true"]
    with pytest.raises(ConfigError, match=r"judge.vl.sleep=True with train.staleness=1.*=false"):
        validate(load_config([base, *ahead, *judge]), dp=1)
    validate(load_config([base, *ahead, judge[0]]), dp=1)


def test_lora_is_not_for_megatrons_fp8_and_for_every_algorithm(base):
    fp8 = "engine={fp8: tensorwise, dtype: bfloat16}"
    megatron = "engine.backend=megatron"
    with pytest.raises(
        ConfigError,
        match="lora.rank=4 with engine.fp8=tensorwise and engine.backend=megatron.*=veomni",
    ):
        validate(load_config([base, "lora.rank=4", fp8, megatron]), dp=1)
    validate(load_config([base, "lora.rank=4", fp8]), dp=1)
    validate(load_config([base, fp8, megatron]), dp=1)
    lora = [base, "lora={rank: 4, alpha: 8}"]
    validate(load_config(lora), dp=1)
    validate(
        load_config(
            [*lora, "algorithm.name=sft", "data.images=photos", "train.updates_per_step=1"]
        ),
        dp=1,
    )


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("eval.every=5", "eval.every=5 without a reward"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef=0.1 with algorithm.name=sft"),
        ("train.updates_per_step=2", "train.updates_per_step=2 with algorithm.name=sft"),
        ("train.staleness=1", "train.staleness=1 with algorithm.name=sft"),
    ],
)
def test_rules_of_supervised_runs(tmp_path, override, text):
    (tmp_path / "c.yaml").write_text(BASE.replace("reward: {color: {type: color}}", ""))
    sft = [
        str(tmp_path / "c.yaml"),
        "algorithm.name=sft",
        "data.images=photos",
        "algorithm.group_size=1",
    ]
    validate(load_config([*sft, "train.updates_per_step=1"]), dp=1, on_policy=False)
    with pytest.raises(ConfigError, match=text):
        config = load_config([*sft, "train.updates_per_step=1", override])
        validate(config, dp=1, on_policy=False)


def test_a_run_without_reward_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_text(BASE.replace("reward: {color: {type: color}}", ""))
    with pytest.raises(ConfigError, match="reward.color.type=color"):
        validate(load_config([str(tmp_path / "c.yaml")]), dp=1)


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "configs").rglob("*.yaml")),
    ids=lambda path: str(path.relative_to(ROOT / "configs").with_suffix("")),
)
def test_every_shipped_config_loads(path):
    config = load_config(shipped_files(path))
    algorithm = build_algorithm(config.algorithm)
    dp = 1 if config.train.prompts_per_step % 8 else 8
    validate(config, dp=dp, on_policy=algorithm.on_policy)
    check_algorithm(config, algorithm)


def test_the_gate_must_run_to_decide(base):
    auto = [base, "algorithm.old_log_prob=auto"]
    validate(load_config(auto), dp=1)
    with pytest.raises(
        ConfigError, match="old_log_prob=auto with parity.mode=off.*old_log_prob=recompute"
    ):
        validate(load_config([*auto, "parity.mode=off"]), dp=1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), True),
        (("lora.rank=4",), False),
        (("train.components=[transformer_2]",), False),
        (("lora.rank=4", "rollout.sleep=always"), True),
        (("rollout.sleep=never",), False),
        (("rollout.mode=separate", "rollout.registry=r"), False),
    ],
)
def test_replicas_sleep_by_themselves_on_gpus_where_every_push_brings_all_weights(
    base, overrides, expected
):
    config = load_config([base, *overrides])
    validate(config, dp=1)
    assert sleeps(config, device_type="cuda") == expected
    assert sleeps(config, device_type="cpu") == (expected and config.rollout.sleep == "always")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollout.sleep=true",), "rollout.sleep='true' is not one of auto, always, never"),
        (
            ("rollout.sleep=always", "rollout.mode=separate", "rollout.registry=r"),
            "set rollout.sleep=auto",
        ),
        (
            ("rollout.fp8=true", "model.dtype=float32"),
            "rollout.fp8 needs model.dtype=bfloat16, not float32",
        ),
    ],
)
def test_sleep_and_fp8_that_cannot_be(base, overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        validate(load_config([base, *overrides]), dp=1)


def test_a_bare_off_is_a_choice_and_no_boolean(base, tmp_path):
    file = tmp_path / "off.yaml"
    file.write_text("parity: {mode: off}")
    for argument in ("parity.mode=off", str(file)):
        config = load_config([base, argument])
        assert config.parity.mode == "off"
        save_config(config, tmp_path / "saved.yaml")
        assert load_config([str(tmp_path / "saved.yaml")]) == config
