import torch

from lightning_dalle.evaluation.clip_features import frame_difference


def test_differences_of_neighbours_are_averaged_clip_by_clip() -> None:
    video = torch.randint(0, 256, (3, 3, 5, 4, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = [
        sum((clip[:, t + 1].double() - clip[:, t].double()).abs().mean() for t in range(4)) / 4 for clip in video
    ]
    torch.testing.assert_close(frame_difference(video), torch.stack(expected).float())


def test_black_and_white_in_turns_move_most() -> None:
    video = torch.tensor([0, 255, 0], dtype=torch.uint8).reshape(1, 1, 3, 1, 1).expand(1, 3, 3, 2, 2)
    assert frame_difference(video).item() == 255


def test_one_frame_does_not_move() -> None:
    assert frame_difference(torch.ones(2, 3, 1, 4, 4, dtype=torch.uint8)).tolist() == [0, 0]
