from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dalle.callbacks import ImageGenerationMetrics
from lightning_dalle.evaluation.features import FeatureExtractor, ImageFeatures
from lightning_dalle.evaluation.scores import frechet_distance
from tests.foreign_module import (
    CAPTIONS,
    LIGHTNING_WARNINGS,
    QUIET,
    Filmer,
    Painter,
    filmed_clips,
    filmed_loader,
    fit,
    painted_images,
    painted_loader,
)

pytestmark = LIGHTNING_WARNINGS


class MeanColour(nn.Module):
    """Three features with a parameter to freeze and a dropout to keep out."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.dropout(images.to(self.gain.dtype).mean(dim=(2, 3)) * self.gain)


class _CountingExtractor(FeatureExtractor):
    def __init__(self) -> None:
        super().__init__(MeanColour(), "colours", "none")
        self.num_images = 0

    def compute(self, images: Tensor) -> ImageFeatures:
        self.num_images += len(images)
        features = self.network(images)
        return ImageFeatures(features, features / 10)


class _Generated(Painter):
    """Paints what it is told to, one image per caption."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images

    def generate(self, captions: Any, num_candidates: int = 1, **_: Any) -> Tensor:
        self.calls.append({"captions": list(captions)})
        start = sum(len(call["captions"]) for call in self.calls[:-1]) % len(self.images)
        return self.images[start : start + len(captions)].unsqueeze(1)


def test_scores_compare_generated_with_validation_images(tmp_path: Path) -> None:
    generated = painted_images(6, seed=1)
    callback = ImageGenerationMetrics(MeanColour(), num_images=6, cache_folder=tmp_path)
    trainer = fit(_Generated(generated), [callback])
    real, fake = painted_images(6).float().mean(dim=(2, 3)), generated.float().mean(dim=(2, 3))
    assert set(callback.scores) == {"fd_mean_colour", "kd_mean_colour", "num_scored_images"}
    assert callback.scores["fd_mean_colour"] == pytest.approx(frechet_distance(real, fake).item(), rel=1e-5)
    assert callback.scores["num_scored_images"] == 6
    for name, score in callback.scores.items():
        assert trainer.callback_metrics[f"val/{name}"].item() == pytest.approx(score, rel=1e-6)


def test_each_caption_of_the_validation_gets_one_image(tmp_path: Path) -> None:
    painter = Painter()
    fit(painter, [ImageGenerationMetrics(MeanColour(), num_images=5, max_batch=3, cache_folder=tmp_path)])
    assert [call["captions"] for call in painter.calls] == [CAPTIONS[:3], CAPTIONS[3:5]]


def test_chunks_of_equal_captions_get_different_images(tmp_path: Path) -> None:
    callback = ImageGenerationMetrics(_CountingExtractor(), num_images=4, max_batch=2, cache_folder=tmp_path)
    painted: list[Tensor] = []

    class Keeping(Painter):
        def generate(self, *arguments: Any, **options: Any) -> Tensor:
            painted.append(super().generate(*arguments, **options))
            return painted[-1]

    fit(Keeping(), [callback])
    assert not torch.equal(*painted)


def test_fewer_images_than_asked_for_are_counted(tmp_path: Path) -> None:
    callback = ImageGenerationMetrics(MeanColour(), num_images=100, cache_folder=tmp_path)
    fit(Painter(), [callback])
    assert callback.scores["num_scored_images"] == 6


def test_turns_do_not_add_up(tmp_path: Path) -> None:
    callback = ImageGenerationMetrics(MeanColour(), num_images=6, cache_folder=tmp_path)
    painter = Painter(learning_rate=0.0)
    fit(painter, [callback])
    first = callback.scores
    fit(painter, [callback], max_epochs=2)
    assert callback.scores == first


def test_features_of_validation_images_are_kept_on_disk(tmp_path: Path) -> None:
    extractors = [_CountingExtractor(), _CountingExtractor()]
    scores = []
    for extractor in extractors:
        callback = ImageGenerationMetrics(extractor, num_images=6)
        fit(Painter(learning_rate=0.0), [callback], max_epochs=2, default_root_dir=tmp_path)
        scores.append(callback.scores)
    # Two turns of 6 generated images, and the real ones once at all.
    assert [extractor.num_images for extractor in extractors] == [6 + 12, 12]
    assert scores[0] == scores[1]
    (path,) = (tmp_path / "feature_cache").rglob("*.pt")
    assert path.parent.name.startswith("colours-")
    assert path.name == "rank_0_of_1.pt"


def test_other_weights_do_not_use_the_features_of_the_first(tmp_path: Path) -> None:
    extractor = _CountingExtractor()
    fit(Painter(), [ImageGenerationMetrics(extractor, num_images=6, cache_folder=tmp_path)])
    other = _CountingExtractor()
    other.network.gain.data *= 2
    fit(Painter(), [ImageGenerationMetrics(other, num_images=6, cache_folder=tmp_path)])
    assert other.num_images == 12


def test_extractor_stays_frozen_and_out_of_the_model(tmp_path: Path) -> None:
    network = MeanColour().train()
    callback = ImageGenerationMetrics(network, num_images=4, cache_folder=tmp_path)
    painter = Painter()
    trainer = fit(painter, [callback], max_epochs=2)
    assert set(painter.state_dict()) == {"level"}
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [1]
    assert not callback.extractor.network.training
    assert network.training
    assert network.gain.requires_grad


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_features_are_fp32_in_any_precision_of_the_trainer(precision: Any, tmp_path: Path) -> None:
    scores = []
    for options in ({}, {"precision": precision}):
        callback = ImageGenerationMetrics(MeanColour(), num_images=6, cache_folder=tmp_path / str(len(options)))
        fit(_Generated(painted_images(6, seed=1)), [callback], **options)
        assert callback.extractor.network.gain.dtype == torch.float32
        scores.append(callback.scores)
    assert scores[0] == scores[1]


def test_floating_point_images_are_rounded_to_bytes(tmp_path: Path) -> None:
    data: Any = [{"image": image / 255, "caption": "dark"} for image in painted_images(6)]
    scores = []
    for loader in (painted_loader(), DataLoader(data, batch_size=2)):
        callback = ImageGenerationMetrics(MeanColour(), num_images=6, cache_folder=tmp_path)
        trainer = Trainer(**QUIET, callbacks=[callback])
        trainer.validate(_Generated(painted_images(6, seed=1)), loader, verbose=False)
        scores.append(callback.scores)
    assert scores[0] == scores[1]


def test_test_run_scores_under_its_own_name(tmp_path: Path) -> None:
    callback = ImageGenerationMetrics(_CountingExtractor(), num_images=6, cache_folder=tmp_path)
    trainer = Trainer(**QUIET, callbacks=[callback])
    trainer.test(Painter(), painted_loader(), verbose=False)
    assert {"test/fd_colours", "test/kd_colours", "test/class_score_colours"} <= set(trainer.callback_metrics)


def test_first_dataloader_counts(tmp_path: Path) -> None:
    painter = Painter()
    callback = ImageGenerationMetrics(MeanColour(), num_images=10, cache_folder=tmp_path)

    class Two(Painter):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    painter = Two()
    trainer = Trainer(**QUIET, callbacks=[callback])
    trainer.validate(painter, [painted_loader(4), painted_loader(6)], verbose=False)
    assert callback.scores["num_scored_images"] == 4
    trainer.test(painter, [painted_loader(4), painted_loader(6)], verbose=False)
    assert callback.scores["num_scored_images"] == 4


def test_details_go_to_the_hyperparameters(tmp_path: Path) -> None:
    callback = ImageGenerationMetrics(MeanColour(), num_images=4, cache_folder=tmp_path)
    fit(Painter(), [callback], logger=CSVLogger(tmp_path, name="run", version=0), log_every_n_steps=1, max_epochs=2)
    logged = load_hparams_from_yaml(tmp_path / "run" / "version_0" / "hparams.yaml")
    assert logged["image_generation_metrics"] == callback.details
    assert set(callback.details) == {"extractor", "weights_sha256", "resize", "dtype"}


def test_features_that_are_not_finite_are_refused_with_the_step(tmp_path: Path) -> None:
    network = MeanColour()
    network.gain.data[1] = torch.nan
    with pytest.raises(FloatingPointError, match="step 3: real features of the extractor mean_colour are not finite"):
        fit(Painter(), [ImageGenerationMetrics(network, num_images=4, cache_folder=tmp_path)])


def test_batches_without_captions_are_refused(tmp_path: Path) -> None:
    loader: DataLoader[Any] = DataLoader(painted_images(4), batch_size=2)  # type: ignore[arg-type]
    trainer = Trainer(**QUIET, callbacks=[ImageGenerationMetrics(MeanColour(), num_images=4, cache_folder=tmp_path)])
    with pytest.raises(TypeError, match="needs batches with 'image' or 'video' and 'caption' and got a Tensor"):
        trainer.validate(Painter(), loader, verbose=False)


@pytest.mark.parametrize(("argument", "value", "least"), [("num_images", 1, 2), ("max_batch", 0, 1)])
def test_wrong_numbers_are_refused(argument: str, value: int, least: int) -> None:
    with pytest.raises(ValueError, match=rf"{argument} \({value}\) must be at least {least}"):
        ImageGenerationMetrics(MeanColour(), **{argument: value})  # type: ignore[arg-type]


class _FilmOf(Filmer):
    """Shows the same clips again and again, one per caption."""

    def __init__(self, clips: Tensor) -> None:
        super().__init__()
        self.clips = clips

    def generate(self, captions: Any, num_candidates: int = 1, **_: Any) -> Tensor:
        self.calls.append({"captions": list(captions)})
        start = sum(len(call["captions"]) for call in self.calls[:-1]) % len(self.clips)
        return self.clips[start : start + len(captions)].unsqueeze(1)


class _ClipColour(nn.Module):
    """Two features of a clip, with a parameter to freeze and a dropout to keep out."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, clips: Tensor) -> Tensor:
        means = clips.to(self.gain.dtype).mean(dim=(1, 3, 4))
        return self.dropout(means[:, [0, -1]] * self.gain)


def validate_clips(callback: ImageGenerationMetrics, clips: Tensor, num_clips: int = 6) -> Trainer:
    trainer = Trainer(**QUIET, callbacks=[callback])
    trainer.validate(_FilmOf(clips), filmed_loader(num_clips), verbose=False)
    return trainer


def frame_means(clips: Tensor) -> Tensor:
    return clips.transpose(1, 2).float().mean(dim=(3, 4))


def test_clips_are_scored_by_their_frames_and_as_a_whole(tmp_path: Path) -> None:
    generated = filmed_clips(6, seed=1)
    callback = ImageGenerationMetrics(MeanColour(), num_images=6, max_batch=4, cache_folder=tmp_path)
    trainer = validate_clips(callback, generated)
    real, fake = frame_means(filmed_clips()), frame_means(generated)
    expected = frechet_distance(real.flatten(0, 1), fake.flatten(0, 1)).item()
    whole = [torch.cat([rows.mean(1), rows.diff(dim=1).abs().mean(1)], dim=1) for rows in (real, fake)]
    assert callback.scores["fd_mean_colour"] == pytest.approx(expected, rel=1e-4)
    assert callback.scores["fd_video_mean_colour"] == pytest.approx(frechet_distance(*whole).item(), rel=1e-4)
    assert (callback.scores["num_scored_images"], callback.scores["num_scored_clips"]) == (18, 6)
    for name, score in callback.scores.items():
        assert trainer.callback_metrics[f"val/{name}"].item() == pytest.approx(score, rel=1e-6)


def test_clips_that_stand_still_are_told_from_those_that_move(tmp_path: Path) -> None:
    scores = []
    for clips in (filmed_clips(6, seed=1), filmed_clips(6)[:, :, :1].expand(-1, -1, 3, -1, -1)):
        callback = ImageGenerationMetrics(MeanColour(), num_images=6, cache_folder=tmp_path)
        validate_clips(callback, clips)
        scores.append(callback.scores["fd_video_mean_colour"])
    assert scores[1] > 1.5 * scores[0]


def test_features_of_clips_can_be_the_user_s(tmp_path: Path) -> None:
    generated, network = filmed_clips(6, seed=1), _ClipColour()
    callback = ImageGenerationMetrics(MeanColour(), num_images=6, cache_folder=tmp_path, video_features=network)
    validate_clips(callback, generated)
    rows = [frame_means(clips).mean(dim=2)[:, [0, -1]] for clips in (filmed_clips(), generated)]
    assert callback.scores["fd_video_clip_colour"] == pytest.approx(frechet_distance(*rows).item(), rel=1e-4)
    assert network.gain.requires_grad
    assert network.training


def test_as_many_clips_as_asked_for_are_scored(tmp_path: Path) -> None:
    callback = ImageGenerationMetrics(MeanColour(), num_images=3, max_batch=2, cache_folder=tmp_path)
    validate_clips(callback, filmed_clips(6, seed=1))
    assert (callback.scores["num_scored_images"], callback.scores["num_scored_clips"]) == (9, 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_features_of_clips_that_are_not_finite_are_refused_with_the_step(tmp_path: Path, value: float) -> None:
    network = _ClipColour()
    network.gain.data[1] = value
    callback = ImageGenerationMetrics(MeanColour(), num_images=4, cache_folder=tmp_path, video_features=network)
    with pytest.raises(FloatingPointError, match="step 0: real features of the extractor video_clip_colour are not"):
        validate_clips(callback, filmed_clips())


def test_features_of_clips_in_another_shape_are_refused(tmp_path: Path) -> None:
    callback = ImageGenerationMetrics(MeanColour(), num_images=4, cache_folder=tmp_path, video_features=nn.Identity())
    with pytest.raises(ValueError, match=r"video_features \(video_identity\) returned .* for 2 clips; it must"):
        validate_clips(callback, filmed_clips())
