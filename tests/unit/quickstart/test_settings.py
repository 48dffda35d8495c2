import json
from pathlib import Path

import pytest

from lightning_dalle.quickstart.settings import TRAINED_STAGES, RunFolder, Sampling, Settings, write_json


def test_unknown_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data \('mnist'\) must be one of 'openmoji', 'shapes', 'moving-shapes', "):
        Settings(data="mnist")  # type: ignore[arg-type]


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed \(-1\) must be at least 0"):
        Settings(data="shapes", seed=-1)


def test_extra_arguments_of_an_unknown_stage_are_refused() -> None:
    with pytest.raises(ValueError, match="extra has tokenizer; its stages must be among discrete_vae, contrastive"):
        Settings(data="shapes", extra={"tokenizer": []})


@pytest.mark.parametrize(("name", "value"), [("num_prompts", 1), ("num_candidates", 0)])
def test_counts_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"sampling.{name} \({value}\) must be at least"):
        Sampling(**{name: value})


def test_tokens_cannot_be_drawn_of_clips() -> None:
    with pytest.raises(ValueError, match="sampling.top_p has no effect on clips"):
        Settings(data="moving-shapes", sampling=Sampling(top_p=0.9))


@pytest.mark.parametrize("data", TRAINED_STAGES)
def test_every_stage_of_training_has_a_recipe(data: str) -> None:
    recipes = Settings(data=data).as_mapping()["recipes"]  # type: ignore[arg-type]
    assert tuple(recipes) == TRAINED_STAGES[data]
    assert all("model:" in text for text in recipes.values())


def test_a_run_is_taken_up_with_the_same_settings_and_keeps_its_group(tmp_path: Path) -> None:
    folder, settings = RunFolder(tmp_path / "run"), Settings(data="shapes", extra={"contrastive": ["--a=1"]})
    folder.claim(settings, fresh=False)
    group = folder.group
    folder.claim(settings, fresh=False)
    assert folder.group == group


def test_a_run_with_other_settings_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim(Settings(data="shapes"), fresh=False)
    with pytest.raises(ValueError, match=r"other settings \(data, recipes\); choose another --output.*--fresh=true"):
        folder.claim(Settings(data="openmoji"), fresh=False)
    with pytest.raises(ValueError, match=r"other settings \(sampling\)"):
        folder.claim(Settings(data="shapes", sampling=Sampling(seed=1)), fresh=False)


def test_a_changed_recipe_is_a_changed_setting(tmp_path: Path) -> None:
    folder, settings = RunFolder(tmp_path), Settings(data="shapes")
    folder.claim(settings, fresh=False)
    stored = json.loads((tmp_path / "settings.json").read_text())
    stored["recipes"]["contrastive"] += "# longer\n"
    write_json(tmp_path / "settings.json", stored)
    with pytest.raises(ValueError, match=r"other settings \(recipes\)"):
        folder.claim(settings, fresh=False)


def test_fresh_deletes_an_earlier_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim(Settings(data="openmoji"), fresh=False)
    (folder.path / "tokenizer.json").write_text("{}")
    folder.claim(Settings(data="shapes"), fresh=True)
    assert [path.name for path in folder.path.iterdir()] == ["settings.json"]


def test_fresh_deletes_nothing_but_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim(Settings(data="shapes"), fresh=False)
    (tmp_path / "notes.txt").write_text("three years of work")
    (tmp_path / "discrete_vae").mkdir()
    folder.checkpoint("discrete_vae").write_text("weights")
    folder.claim(Settings(data="openmoji"), fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "settings.json"]


def test_the_settings_of_another_program_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"editor.fontSize": 12}')
    for fresh in (False, True):
        with pytest.raises(ValueError, match="is not empty and holds no quickstart"):
            RunFolder(tmp_path).claim(Settings(data="shapes"), fresh)
    assert (tmp_path / "settings.json").read_text() == '{"editor.fontSize": 12}'


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and holds no quickstart; choose another --output"):
        RunFolder(tmp_path).claim(Settings(data="shapes"), fresh)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_each_data_set_has_its_own_way_of_sampling_unless_told_otherwise() -> None:
    assert Sampling(seed=3).for_data("shapes") == Sampling(
        num_candidates=8, seed=3, temperature=1.0, guidance_scale=1.5
    )
    assert Sampling(temperature=0.7).for_data("openmoji") == Sampling(
        num_candidates=8, temperature=0.7, guidance_scale=1.0
    )
