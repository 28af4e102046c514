"""A relative model.path that is missing here is found beside the config file."""

import pytest

from megadiff.config.load import ConfigError, check_model_path, load_config

CONFIG = """
run: {name: test}
train: {num_steps: 3, prompts_per_step: 4}
rollout: {height: 64, width: 64}
optim: {lr: 1e-4}
"""


def test_a_model_beside_the_config_file_is_named(tmp_path, monkeypatch):
    """A clone's config, with the command run elsewhere."""
    clone = tmp_path / "clone"
    (clone / "assets" / "shapes").mkdir(parents=True)
    (clone / "configs").mkdir()
    file = clone / "configs" / "a.yaml"
    file.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    arguments = [str(file), "model.path=assets/shapes"]
    with pytest.raises(ConfigError) as caught:
        check_model_path(load_config(arguments), arguments)
    assert f"it means {tmp_path}/assets/shapes: relative paths start at the" in str(caught.value)
    assert f"start the command in {clone}, or set model.path={clone}/assets/s" in str(caught.value)

    for path in ("assets/other", str(clone / "gone"), "clone/assets/shapes"):
        arguments = [str(file), f"model.path={path}"]
        check_model_path(load_config(arguments), arguments)
