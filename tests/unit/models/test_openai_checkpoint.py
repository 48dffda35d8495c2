"""The released layout: exchanged with the PyPI package both ways, and never executed."""

import os
import pickle
import sys
from pathlib import Path

import dall_e
import pytest
import torch
from torch import nn

from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.models.openai_checkpoint import (
    from_openai_state_dicts,
    load_openai_discrete_vae,
    read_openai_state_dict,
)

SIZES = {"n_hid": 64, "n_blk_per_group": 1, "vocab_size": 512}
CONFIG = DiscreteVAEConfig(image_size=32, hidden_width=64, blocks_per_group=1, codebook_size=512)


@pytest.fixture(scope="module")
def released() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return dall_e.Encoder(**SIZES), dall_e.Decoder(**SIZES)


@pytest.fixture(scope="module")
def released_files(released: tuple[nn.Module, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("released")
    paths = [folder / "encoder.pkl", folder / "decoder.pkl"]
    for module, path in zip(released, paths, strict=True):
        torch.save(module, path)
    return paths


def assert_equal_outputs(network: DiscreteVAE, encoder: nn.Module, decoder: nn.Module) -> None:
    mapped = dall_e.map_pixels(torch.rand(2, 3, 32, 32))
    codes = torch.randn(2, 512, 4, 4).softmax(dim=1)
    with torch.no_grad():
        assert torch.equal(network.encode_logits(mapped), encoder(mapped))
        assert torch.equal(torch.cat(network.decode_maps(codes), dim=1), decoder(codes))


def test_state_dicts_of_the_pypi_package_load_strictly(released: tuple[nn.Module, nn.Module]) -> None:
    encoder, decoder = released
    network = from_openai_state_dicts(encoder.state_dict(), decoder.state_dict(), image_size=32)
    assert network.config == CONFIG
    assert_equal_outputs(network, encoder, decoder)


def test_pypi_package_loads_our_state_dicts_strictly() -> None:
    torch.manual_seed(1)
    network = DiscreteVAE(CONFIG)
    encoder, decoder = dall_e.Encoder(**SIZES), dall_e.Decoder(**SIZES)
    encoder.load_state_dict(network.encoder.state_dict(), strict=True)
    decoder.load_state_dict(network.decoder.state_dict(), strict=True)
    assert_equal_outputs(network, encoder, decoder)


def test_whole_module_pickles_are_read(released: tuple[nn.Module, nn.Module], released_files: list[Path]) -> None:
    network = load_openai_discrete_vae(*released_files, image_size=32)
    assert_equal_outputs(network, *released)
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_reading_does_not_import_the_pickled_classes(
    released: tuple[nn.Module, nn.Module], released_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dall_e.encoder", "dall_e.utils", "torch.nn.modules.container"):
        monkeypatch.setitem(sys.modules, name, None)
    state = read_openai_state_dict(released_files[0])
    assert list(state) == list(released[0].state_dict())


def test_reading_leaves_no_class_allowed_behind(released_files: list[Path]) -> None:
    before = set(torch.serialization.get_safe_globals())
    read_openai_state_dict(released_files[0])
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(released_files[0], weights_only=True)


def test_plain_state_dict_is_read(released: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    paths = [tmp_path / "encoder.pt", tmp_path / "decoder.pt"]
    for module, path in zip(released, paths, strict=True):
        torch.save(module.state_dict(), path)
    assert_equal_outputs(load_openai_discrete_vae(*paths, image_size=32), *released)


class _Malicious:
    """Creates a file where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("legacy", [False, True])
def test_foreign_pickle_is_refused_by_name_and_not_executed(tmp_path: Path, legacy: bool) -> None:
    witness = tmp_path / "executed"
    path = tmp_path / "encoder.pkl"
    torch.save({"blocks.input.w": _Malicious(witness)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match="nothing of it was executed: it asks for posix.mkdir"):
        read_openai_state_dict(path)
    assert not witness.exists()


def test_foreign_module_class_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Conv2d(1, 1, 1), tmp_path / "encoder.pkl")
    with pytest.raises(ValueError, match="it asks for torch.nn.modules.conv.Conv2d"):
        read_openai_state_dict(tmp_path / "encoder.pkl")


def test_bare_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "encoder.pkl"
    path.write_bytes(pickle.dumps(_Malicious(tmp_path / "executed"), protocol=2))
    with pytest.raises(ValueError, match="is refused"):
        read_openai_state_dict(path)
    assert not (tmp_path / "executed").exists()


def test_file_without_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": "none"}, tmp_path / "encoder.pt")
    with pytest.raises(ValueError, match="holds a dict, not a module or a state dict of tensors"):
        read_openai_state_dict(tmp_path / "encoder.pt")


def test_other_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown names \['conv1.weight'\] and without \['blocks.input.w'"):
        from_openai_state_dicts({"conv1.weight": torch.zeros(1)}, {})


def test_absent_tensor_is_named(released: tuple[nn.Module, nn.Module]) -> None:
    encoder, decoder = (module.state_dict() for module in released)
    del encoder["blocks.group_2.block_1.id_path.b"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.group_2\.block_1\.id_path\.b"):
        from_openai_state_dicts(encoder, decoder)
