"""The released discrete VAE, read without executing the pickles it comes in.

OpenAI's `encoder.pkl` and `decoder.pkl` are whole modules written by `torch.save`; loading one the ordinary way
runs whatever its pickle asks for. Here torch's `weights_only` reader takes the tensors, the modules' classes are
replaced by inert stand-ins, and any other name is refused.
"""

import pickle
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig

MODULE_CLASSES = (
    "dall_e.encoder.Encoder",
    "dall_e.encoder.EncoderBlock",
    "dall_e.decoder.Decoder",
    "dall_e.decoder.DecoderBlock",
    "dall_e.utils.Conv2d",
    "torch.nn.modules.container.Sequential",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.pooling.MaxPool2d",
    "torch.nn.modules.upsampling.Upsample",
)
STATE_KEY = re.compile(r"blocks\.(input|group_(\d+)\.block_(\d+)\.(id_path|res_path\.conv_[1-4])|output\.conv)\.[wb]")


class _InertModule:
    """Takes the place of a pickled module: holds its attributes and does nothing."""


def load_openai_discrete_vae(
    encoder_path: str | PathLike[str], decoder_path: str | PathLike[str], *, image_size: int = 256
) -> DiscreteVAE:
    """Read the released encoder and decoder.

    Args:
        encoder_path: The released `encoder.pkl`, or a state dict of it written by `torch.save`.
        decoder_path: The released `decoder.pkl`, or a state dict of it.
        image_size: The network is fully convolutional; the released one was trained at 256.

    Raises:
        ValueError: If a file asks for anything but tensors and the released classes, or holds other names.
        RuntimeError: If a tensor is absent or of another shape.
    """
    return from_openai_state_dicts(
        read_openai_state_dict(encoder_path), read_openai_state_dict(decoder_path), image_size=image_size
    )


def from_openai_state_dicts(
    encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor], *, image_size: int = 256
) -> DiscreteVAE:
    """Build the network whose sizes the state dicts of `dall_e.Encoder` and `dall_e.Decoder` show.

    The other way needs no function: `network.encoder.state_dict()` is what `dall_e.Encoder` loads.

    Raises:
        ValueError: If a name is not one of the released layout.
        RuntimeError: If a tensor is absent or of another shape.
    """
    matches = {name: STATE_KEY.fullmatch(name) for state in (encoder, decoder) for name in state}
    foreign = [name for name, match in matches.items() if match is None]
    blocks = [(int(match[2]), int(match[3])) for match in matches.values() if match and match[2]]
    ends = [f"blocks.{end}.w" for end in ("input", "output.conv")]
    absent = [name for name in ends if name not in encoder or name not in decoder]
    if foreign or absent or not blocks:
        raise ValueError(
            f"state dicts with unknown names {foreign[:3]} and without {absent} do not have the released layout; "
            "give those of dall_e.Encoder and dall_e.Decoder"
        )
    config = DiscreteVAEConfig(
        image_size=image_size,
        codebook_size=len(encoder["blocks.output.conv.w"]),
        hidden_width=len(encoder["blocks.input.w"]),
        num_groups=max(group for group, _ in blocks),
        blocks_per_group=max(block for _, block in blocks),
        decoder_input_width=len(decoder["blocks.input.w"]),
    )
    with torch.device("meta"):
        network = DiscreteVAE(config)
    network.encoder.load_state_dict(dict(encoder), strict=True, assign=True)
    network.decoder.load_state_dict(dict(decoder), strict=True, assign=True)
    return network.requires_grad_()


def read_openai_state_dict(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Return the named tensors of a released module, or of a state dict, written by `torch.save`.

    Raises:
        ValueError: If the file asks for anything but tensors and the released classes.
    """
    allowed: list[Any] = [(_InertModule, name) for name in MODULE_CLASSES]
    allowed.append((set, "__builtin__.set"))
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked_for = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it asks for {asked_for[1]}" if asked_for else "it is not a file of tensors written by torch.save"
        raise ValueError(
            f"{path} is refused, nothing of it was executed: {reason}; "
            "give the released encoder.pkl or decoder.pkl, or a state dict"
        ) from error
    tensors = _named_tensors(content) if isinstance(content, _InertModule) else content
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a module or a state dict of tensors")
    return tensors


def _named_tensors(module: _InertModule, prefix: str = "") -> dict[str, Tensor]:
    """Walk the attributes that a pickled `nn.Module` consists of."""
    attributes = vars(module)
    tensors = {prefix + name: parameter.detach() for name, parameter in attributes.get("_parameters", {}).items()}
    for name, child in attributes.get("_modules", {}).items():
        tensors |= _named_tensors(child, f"{prefix}{name}.")
    return tensors
