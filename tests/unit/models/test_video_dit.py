"""The video transformer: sizes, packing, known first frames, positions, precision and what may be done to it."""

import dataclasses
from typing import Any

import jaxtyping
import pytest
import torch

from lightning_dalle.models.video_dit import Prediction, TextConditioning, VideoDiT, VideoDiTConfig
from lightning_dalle.ops.flow_matching import LEAST_TIME
from lightning_dalle.ops.patchify import patchify
from lightning_dalle.ops.rope import RotaryGridConfig
from lightning_dalle.ops.rope_scaling import NTKAware
from tests.rounding import assert_only_rounded

TINY = VideoDiTConfig(
    depth=2,
    num_heads=2,
    head_dim=16,
    feed_forward_width=24,
    channels=3,
    patch_size=(1, 2, 2),
    text_width=6,
    time_features=8,
    rotary=RotaryGridConfig(original_max_position_embeddings=(4, 3, 4)),
)
JOINT = dataclasses.replace(TINY, conditioning="joint")
CLEAN = dataclasses.replace(TINY, prediction="clean")
# Told once more: the caption as a whole, and places.
TOLD = dataclasses.replace(TINY, pooled_text=True, position_features=5)
JOINT_TOLD = dataclasses.replace(JOINT, pooled_text=True, position_features=5)
IDS = ["cross_attention", "joint", "cross_attention_told", "joint_told"]
EACH = pytest.mark.parametrize("config", [TINY, JOINT, TOLD, JOINT_TOLD], ids=IDS)
SIZES = [(4, 6, 8), (1, 2, 4), (3, 4, 2)]


def _network(config: VideoDiTConfig = TINY) -> VideoDiT:
    """Weights large enough that every path shows in the outputs, in float64."""
    torch.manual_seed(0)
    network = VideoDiT(config).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def _clips(count: int = 3, size: tuple[int, int, int] = (4, 6, 8)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    clips = torch.randn(count, 3, *size, dtype=torch.float64, generator=generator)
    times = torch.rand(count, dtype=torch.float64, generator=generator)
    return clips, times, torch.randn(count, 5, 6, dtype=torch.float64, generator=generator)


@EACH
def test_velocities_are_zero_and_blocks_the_identity_before_training(config: VideoDiTConfig) -> None:
    network, (clips, times, text) = VideoDiT(config), (part.float() for part in _clips())
    passed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in network.trunk.blocks:
        block.register_forward_hook(lambda block, inputs, output: passed.append((inputs[0], output)))
    assert (network(clips, times, text) == 0).all()
    assert len(passed) == config.depth
    assert all(torch.equal(hidden, output) for hidden, output in passed)


@pytest.mark.parametrize("prediction", ["velocity", "clean"])
def test_outputs_start_from_the_mean_of_the_data(prediction: Prediction) -> None:
    network = VideoDiT(dataclasses.replace(TINY, prediction=prediction, data_mean=0.75))
    clips, times, text = (part.float() for part in _clips())
    velocity = network(clips, times, text)
    assert isinstance(velocity, torch.Tensor)
    if prediction == "velocity":
        # That of noise to data of this mean.
        assert (velocity == -0.75).all()
    else:
        led_to = clips - times.view(3, 1, 1, 1, 1) * velocity
        steps = times.view(3, 1, 1, 1, 1)
        plain = clips - steps * ((clips - 0.75) / steps)
        assert_only_rounded(led_to, plain, torch.full_like(clips, 0.75, dtype=torch.float64))


@pytest.mark.parametrize("config", [TINY, JOINT, CLEAN, TOLD, JOINT_TOLD], ids=["plain", "joint", "clean", *IDS[2:]])
@pytest.mark.parametrize("known_first", [None, [True, False, True]])
def test_packed_clips_equal_single_ones_with_their_gradients(
    config: VideoDiTConfig, known_first: list[bool] | None
) -> None:
    network = _network(config)
    _, times, text = _clips()
    clips = [torch.randn(3, *size, dtype=torch.float64) for size in SIZES]
    known = None if known_first is None else torch.tensor(known_first)
    packed = network(clips, times, text, known_first=known)
    gradients = torch.autograd.grad(sum(clip.square().sum() for clip in packed), list(network.parameters()))
    alone = [
        network(
            clip.unsqueeze(0),
            times[index : index + 1],
            text[index : index + 1],
            known_first=None if known is None else known[index : index + 1],
        ).squeeze(0)
        for index, clip in enumerate(clips)
    ]
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    expected = torch.autograd.grad(sum(clip.square().sum() for clip in alone), list(network.parameters()))
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-9)


@EACH
def test_packed_clips_do_not_see_each_other(config: VideoDiTConfig) -> None:
    network = _network(config)
    _, times, text = _clips()
    clips = [torch.randn(3, *size, dtype=torch.float64) for size in SIZES]
    before = network(clips, times, text)
    changed = network([clips[0], clips[1] + 1, clips[2]], times, text + torch.tensor([0, 1, 0]).view(3, 1, 1))
    for index in (0, 2):
        assert torch.equal(changed[index], before[index])
    assert not torch.allclose(changed[1], before[1])


@EACH
def test_every_value_depends_on_clip_time_and_caption(config: VideoDiTConfig) -> None:
    network = _network(config)
    clips, times, text = _clips(1)
    before = network(clips, times, text)
    moved = clips.clone()
    moved[0, 0, 3, 5, 7] += 1
    for arguments in ((moved, times, text), (clips, times / 2, text), (clips, times, text + 1)):
        assert ((network(*arguments) - before).abs() > 1e-9).all()


@EACH
@pytest.mark.parametrize("known_first", [None, [True, False, True]])
def test_clean_data_are_what_the_velocities_lead_to(config: VideoDiTConfig, known_first: list[bool] | None) -> None:
    known = None if known_first is None else torch.tensor(known_first)
    network, clean = _network(config), _network(dataclasses.replace(config, prediction="clean"))
    clips, _, text = _clips()
    times = torch.tensor([0.01, 0.3, 1.0], dtype=torch.float64)
    output = network(clips, times, text, known_first=known)
    velocity = clean(clips, times, text, known_first=known)
    assert isinstance(output, torch.Tensor)
    assert isinstance(velocity, torch.Tensor)
    steps = torch.tensor([LEAST_TIME, 0.3, 1.0], dtype=torch.float64).view(3, 1, 1, 1, 1)
    torch.testing.assert_close(clips - steps * velocity, output, rtol=0, atol=1e-12)


@EACH
def test_known_first_frame_goes_by_the_time_of_data(config: VideoDiTConfig) -> None:
    network = _network(config)
    clips, times, text = _clips()
    known = torch.tensor([False, True, True])
    mixed = network(clips, times, text, known_first=known)
    plain = network(clips, times, text)
    torch.testing.assert_close(mixed[0], plain[0], rtol=0, atol=1e-12)
    assert ((mixed[1:] - plain[1:]).abs() > 1e-9).all()
    # At time 0 the first frame is data anyway.
    still = network(clips, torch.zeros_like(times), text, known_first=known)
    torch.testing.assert_close(still, network(clips, torch.zeros_like(times), text), rtol=0, atol=1e-12)


def test_text_among_the_tokens_is_modulated_by_offsets_of_its_own() -> None:
    network = _network(JOINT)
    before = network(*_clips())
    with torch.no_grad():
        network.trunk.blocks[0].modulation[1] += 1
    assert ((network(*_clips()) - before).abs() > 1e-9).all()


def test_positions_are_told_apart_and_policies_change_them() -> None:
    network = _network()
    clips, times, text = _clips(1)
    before = network(clips, times, text)
    assert not torch.allclose(network(clips.flip(2), times, text).flip(2), before)
    assert torch.equal(network(clips, times, text, policies=("default",) * 3), before)
    longer, times, text = _clips(1, (8, 6, 8))
    policies = ("riflex", "default", NTKAware()), ("position_interpolation", "default", "default"), ("default",) * 3
    results = [network(longer, times, text, policies=chosen) for chosen in policies]
    assert not torch.allclose(results[0], results[2])
    assert not torch.allclose(results[1], results[2])


def test_places_are_known_without_rotations() -> None:
    network = _network(dataclasses.replace(TINY, position_features=12))
    for index in range(TINY.depth):
        torch.nn.init.zeros_(network.get_parameter(f"trunk.blocks.{index}.attention.output.weight"))
    clips, times, text = _clips(1)
    same = clips[..., :2, :2].mean().expand_as(clips)
    output = network(same, times, text)
    assert isinstance(output, torch.Tensor)
    tokens = patchify(output, TINY.patch_size)[0]
    apart = torch.cdist(tokens, tokens) + torch.eye(len(tokens))
    assert apart.min() > 1e-6
    # A longer clip that is interpolated ends on the trained end, and one that is not begins with the trained clip.
    longer = same[:, :, :1].expand(-1, -1, 7, -1, -1)
    ends = network(longer, times, text, policies=("position_interpolation", "default", "default"))
    begins = network(longer, times, text, policies=("default",) * 3)
    torch.testing.assert_close(ends[:, :, ::2], output, rtol=0, atol=1e-12)
    torch.testing.assert_close(begins[:, :, :4], output, rtol=0, atol=1e-12)


def test_pooled_captions_reach_what_no_attention_reads() -> None:
    network = _network(TOLD)
    for index in range(TOLD.depth):
        torch.nn.init.zeros_(network.get_parameter(f"trunk.blocks.{index}.text_attention.output.weight"))
    clips, times, text = _clips()
    assert not torch.allclose(network(clips, times, text + 1), network(clips, times, text))
    # It is the mean that counts here, not the order.
    torch.testing.assert_close(network(clips, times, text.flip(1)), network(clips, times, text), rtol=0, atol=1e-12)
    # Nor does the room behind a caption's end, or a caption that is none.
    roomy = torch.cat([text, torch.zeros_like(text)], dim=1)
    torch.testing.assert_close(network(clips, times, roomy), network(clips, times, text), rtol=0, atol=1e-12)
    assert torch.isfinite(network(clips, times, torch.zeros_like(text))).all()


@EACH
def test_activation_checkpointing_changes_no_gradient(config: VideoDiTConfig) -> None:
    gradients = []
    for checkpointing in (False, True):
        network = _network(dataclasses.replace(config, activation_checkpointing=checkpointing))
        gradients.append(torch.autograd.grad(network(*_clips()).square().sum(), list(network.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=0)


# What tests wrap around classes breaks the graph, at whose edges the compiler looks at gradients and warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_network_gives_the_same_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    # The checks of shapes in tests are no code that a compiler traces.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    network = _network(dataclasses.replace(TINY, depth=1))
    # What is generated of the graph is torch's own matter, and slow to make.
    compiled = torch.compile(network, backend="eager")
    expected, output = network(*_clips()), compiled(*_clips())
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    gradients = [
        torch.autograd.grad(result.sum(), network.final_layer.output.weight)[0] for result in (output, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_autocast_is_near_float32() -> None:
    network = _network().float()
    arguments = [part.float() for part in _clips()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = network(*arguments)
    low.float().sum().backward()
    low, expected = low.detach(), network(*arguments).detach()
    assert float((low - expected).std() / expected.std()) < 0.05


def test_positions_are_no_state_and_a_network_without_memory_can_be_built() -> None:
    assert not [name for name in _network().state_dict() if "rot" in name or "freq" in name]
    assert not list(_network().buffers())
    with torch.device("meta"):
        network = VideoDiT(TINY)
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    network = network.to_empty(device="cpu")
    network.reset_parameters()
    assert network(*(part.float() for part in _clips())).shape == (3, 3, 4, 6, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, r"depth \(0\) must be at least 1"),
        ({"patch_size": (1, 0, 2)}, r"patch_size \(0\) must be at least 1"),
        ({"patch_size": (1, 2)}, r"patch_size \(1, 2\) must have three sides"),
        ({"position_features": -1}, r"position_features \(-1\) must be at least 0"),
        ({"time_features": 7}, r"time_features \(7\) must be even"),
        ({"conditioning": "cross"}, r"conditioning \('cross'\) must be 'cross_attention' or 'joint'"),
        ({"prediction": "noise"}, r"prediction \('noise'\) must be 'velocity' or 'clean'"),
        ({"head_dim": 24}, r"head_dim \(24\) must be a multiple of 16"),
    ],
)
def test_bad_sizes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_bad_clips_are_named() -> None:
    network = _network()
    clips, times, text = _clips()
    with pytest.raises(
        ValueError, match=r"height has 4 tokens, more than the 3 of original_max_position_embeddings; choose policies"
    ):
        network(torch.zeros(3, 3, 4, 8, 8).double(), times, text)
    with pytest.raises(ValueError, match=r"width \(7\) must be a positive multiple of the patch's 2"):
        network(clips[..., :7], times, text)
    with pytest.raises(ValueError, match=r"clips \(2\), times \(3\) and text \(3\) must be equally many"):
        network(list(clips[:2]), times, text)


@pytest.mark.parametrize("conditioning", ["cross_attention", "joint"])
def test_trained_policies_need_no_choice_beyond_the_trained_lengths(conditioning: TextConditioning) -> None:
    policies = ("position_interpolation", "default", "default")
    rotary = RotaryGridConfig(original_max_position_embeddings=(4, 3, 4), policies=policies)
    network = _network(dataclasses.replace(TINY, rotary=rotary, conditioning=conditioning))
    longer = _clips(1, (6, 6, 8))
    torch.testing.assert_close(network(*longer), network(*longer, policies=policies), rtol=0, atol=0)
