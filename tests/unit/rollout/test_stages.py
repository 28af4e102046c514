"""Stage configuration files: read as vllm-omni reads them, or refused by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from megadiff.models.adapter import ModelAdapter
from megadiff.models.bagel.adapter import BagelAdapter
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.rollout import stages

BAGEL: Any = BagelAdapter.__new__(BagelAdapter)
STAGE = {"stage_id": 0, "max_num_seqs": 1, "devices": "0"}
THINKING = {
    "think": True,
    "max_think_tokens": 12,
    "do_sample": True,
    "text_temperature": 0.5,
}


def thinking(**changes: object) -> dict:
    """What a stage that thinks says of it, with changes."""
    return {"default_sampling_params": {"extra_args": THINKING | changes}}


def written(folder: Path, *rows: dict, **settings: Any) -> Path:
    file = folder / "stages.yaml"
    whole = {"pipeline": "bagel_single_stage", "stages": list(rows)} | settings
    file.write_text(yaml.safe_dump(whole))
    return file


def deploy_files() -> Path:
    """Return vllm-omni's own files, without its import of ten seconds."""
    spec = find_spec("vllm_omni")
    assert spec and spec.origin
    return Path(spec.origin).parent / "deploy"


def test_file_of_vllm_omni_fits() -> None:
    file = deploy_files() / "bagel_single_stage.yaml"
    stages.check_stages(file, BAGEL, tp=1, num_devices=1)
    assert stages.thinking(file) == {"think_tokens": 0, "think_temperature": 0.0}
    assert stages.thinking("") == {}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"stage_id": 1}, r"has stages \[1\]; bagel_single_stage has one, of stage_id 0"),
        ({"model_class_name": "QwenImagePipeline"}, "model_class_name is 'QwenImagePipeline', not"),
        ({"max_num_seqs": 8}, "max_num_seqs is 8, not 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, not 1"),
        ({"devices": "3"}, "names GPU 3, 1 are visible to the replica; give 0 to 0"),
        ({"devices": "0,1"}, "names 2 GPUs, rollout.tp=1 takes 1"),
        ({"devices": "all"}, "devices is 'all'; give numbers"),
        ({"lora_path": "mine"}, "has lora_path, which the run's own config decides"),
        ({"devices": "0,0"}, "devices is '0,0', a GPU twice"),
        ({"default_sampling_params": {"num_inference_steps": 4}}, "has num_inference_steps, which"),
        ({"default_sampling_params": ["think"]}, r"sampling_params is \['think'\]; it must"),
        (thinking(cfg_text_scale=4.0), "extra_args has cfg_text_scale, which"),
        (thinking(max_think_tokens="many"), "max_think_tokens is 'many', it must be int"),
        (thinking(max_think_tokens=0), "max_think_tokens is 0; give 1 to 4096"),
        (thinking(max_think_tokens=9000), "max_think_tokens is 9000; give 1 to 4096"),
        (thinking(text_temperature=0.0), "text_temperature is 0.0 with do_sample: true"),
        (
            thinking(text_temperature=500),
            "text_temperature is 500 with do_sample: true; give more than 0, at most 100",
        ),
    ],
)
def test_stages_that_do_not_fit_are_refused(tmp_path: Path, stage: dict, message: str) -> None:
    file = written(tmp_path, STAGE | stage)
    with pytest.raises(ValueError, match=message) as error:
        stages.check_stages(file, BAGEL, tp=1, num_devices=1)
    assert f"rollout.stage_config={file}" in str(error.value)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(file: Path, adapter: ModelAdapter = BAGEL) -> str:
        with pytest.raises(ValueError, match=r"rollout\.stage_config=") as error:
            stages.check_stages(file, adapter, tp=1)
        return str(error.value)

    single = deploy_files() / "bagel_single_stage.yaml"
    qwen: Any = QwenImageAdapter.__new__(QwenImageAdapter)
    assert "without a stage file; leave rollout.stage_config empty" in refused(single, qwen)
    assert "cannot be read: No such file" in refused(tmp_path / "none.yaml")
    # two stages: the thinker as an engine of its own
    think = deploy_files() / "bagel_think.yaml"
    assert "is of pipeline 'bagel_think'" in refused(think)
    assert "without a stage file; leave" in refused(think, qwen)
    # a run asks for the settings first; what else the file says is not for that question
    assert stages.thinking(think) == {"think_tokens": 0, "think_temperature": 0.0}
    assert "has stages [0, 1]" in refused(written(tmp_path, STAGE, {"stage_id": 1}))
    assert "has stages []" in refused(written(tmp_path))
    assert "has platforms, which" in refused(written(tmp_path, STAGE, platforms={}))

    file = tmp_path / "other.yaml"
    for text, message in (
        ("a: [", "is no YAML"),
        ("3", "no list of `stages`"),
        ("stages: [{stage_id: [0]}]", "has stages [[0]]; give each a number as stage_id"),
        ("base_config: other.yaml", "other.yaml is its own base_config; name another file"),
    ):
        file.write_text(text)
        assert message in refused(file)


def test_base_config_is_merged_stage_by_stage(tmp_path: Path) -> None:
    """A file over a base keeps what it does not say, also within the sampling parameters."""
    parameters = {"seed": 52, "extra_args": THINKING}
    base = written(tmp_path, STAGE | {"default_sampling_params": parameters})
    base.rename(tmp_path / "base.yaml")
    over = {"stage_id": 0, "default_sampling_params": {"extra_args": {"max_think_tokens": 7}}}
    file = written(tmp_path, over, base_config="base.yaml")

    stages.check_stages(file, BAGEL, tp=1, num_devices=1)
    (stage,) = stages.read_stages(file)["stages"]
    assert stage["devices"] == "0" and stage["default_sampling_params"]["seed"] == 52
    assert stages.thinking(file) == {"think_tokens": 7, "think_temperature": 0.5}


def test_greedy_thinking_has_no_temperature(tmp_path: Path) -> None:
    extra = {"think": True, "max_think_tokens": 12}
    file = written(tmp_path, STAGE | {"default_sampling_params": {"extra_args": extra}})
    assert stages.thinking(file) == {"think_tokens": 12, "think_temperature": 0.0}


def test_own_stage_of_a_family_fits(tmp_path: Path) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text(stages.single_stage("bagel_single_stage", tp=2))
    stages.check_stages(file, BAGEL, tp=2, num_devices=2)
    assert stages.read_stages(file)["stages"][0]["devices"] == "0,1"
