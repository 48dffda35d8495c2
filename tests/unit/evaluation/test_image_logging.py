from io import BytesIO
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from lightning_dalle.evaluation.logging import log_image
from tests.offline_wandb import offline_wandb


@pytest.fixture
def image() -> Tensor:
    return torch.randint(0, 256, (3, 6, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def _read(file: Path | BytesIO) -> Tensor:
    with Image.open(file) as image:
        return pil_to_tensor(image.convert("RGB"))


def test_csv_logger_gets_a_file_beside_its_figures(image: Tensor, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", version=0)
    log_image([logger], "val/images", image, step=7, caption="a red diamond")
    folder = tmp_path / "run" / "version_0" / "images"
    assert torch.equal(_read(folder / "val-images-7.png"), image)
    assert (folder / "val-images-7.txt").read_text() == "a red diamond\n"


def test_tensorboard_gets_image_and_text(image: Tensor, tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    log_image([logger], "val/images", image, step=7, caption="a red diamond")
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    (logged,) = events.Images("val/images")
    assert logged.step == 7
    decoded = _read(BytesIO(logged.encoded_image_string))
    assert torch.equal(decoded, image)
    (text,) = events.Tensors("val/images/text_summary")
    assert text.tensor_proto.string_val == [b"a red diamond"]


def test_offline_wandb_gets_the_image(image: Tensor, tmp_path: Path) -> None:
    with offline_wandb():
        logger = WandbLogger(offline=True, save_dir=tmp_path)
        log_image([logger], "val/images", image, step=7, caption="a red diamond")
        logger.experiment.finish()
    (path,) = tmp_path.rglob("media/images/val/images*.png")
    assert torch.equal(_read(path), image)


def test_no_caption_leaves_no_text(image: Tensor, tmp_path: Path) -> None:
    log_image([CSVLogger(tmp_path, name="run", version=0)], "grid", image, step=0)
    assert [path.suffix for path in (tmp_path / "run").rglob("grid*")] == [".png"]


class _MetricLogger(Logger):
    name = "metrics"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *arguments: object, **options: object) -> None:
        pass


def test_logger_without_pictures_and_folder_is_warned_about(image: Tensor) -> None:
    with pytest.warns(UserWarning, match="_MetricLogger takes no pictures and has no folder: grid is left out"):
        log_image([_MetricLogger()], "grid", image, step=0)
