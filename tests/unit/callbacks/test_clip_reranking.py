from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor
from torchvision.utils import make_grid

from lightning_dalle.callbacks import CLIPReranking
from lightning_dalle.callbacks.clip_reranking import MAX_CANDIDATES_AT_ONCE, RerankingResult
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule
from lightning_dalle.models.contrastive import ContrastiveConfig
from tests.foreign_module import LIGHTNING_WARNINGS, QUIET, Brightness, Filmer, Painter, fit, painted_loader

pytestmark = LIGHTNING_WARNINGS
PROMPTS = ["a dark field", "a light field"]


def _result(callback: CLIPReranking) -> RerankingResult:
    assert callback.result is not None
    return callback.result


class _Fixed:
    def __init__(self, scores: list[float]) -> None:
        self.scores = torch.tensor(scores)

    def score(self, images: Tensor, captions: Sequence[str]) -> Tensor:
        return self.scores.unsqueeze(1)


class _Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.dropout = nn.Dropout(0.5)

    def score(self, images: Tensor, captions: Sequence[str]) -> Tensor:
        return self.dropout(self.linear(images.float().mean(dim=(2, 3)))).expand(-1, len(captions))


def test_best_candidates_are_kept_best_first() -> None:
    callback = CLIPReranking(PROMPTS, Brightness(), num_candidates=5, keep=3)
    painter = Painter()
    trainer = fit(painter, [callback])
    result = _result(callback)
    assert result.step == trainer.global_step
    assert result.captions == tuple(PROMPTS)
    assert (result.images.shape, result.scores.shape, result.order.shape) == ((2, 3, 3, 8, 8), (2, 5), (2, 3))
    torch.testing.assert_close(
        result.images.double().mean(dim=(2, 3, 4)).float(), result.scores.gather(1, result.order)
    )
    assert torch.equal(result.scores.gather(1, result.order), result.scores.topk(3, dim=1).values)
    metrics = trainer.callback_metrics
    torch.testing.assert_close(metrics["val/reranking_best_score"], result.scores.max(dim=1).values.mean())
    torch.testing.assert_close(metrics["val/reranking_mean_score"], result.scores.mean())


def test_clips_are_ranked_by_the_mean_over_their_frames(tmp_path: Path) -> None:
    callback = CLIPReranking(PROMPTS, Brightness(), num_candidates=5, keep=2)
    trainer = fit(Filmer(), [callback], logger=CSVLogger(tmp_path, name="run", version=0), log_every_n_steps=1)
    result = _result(callback)
    assert (result.images.shape, result.scores.shape) == ((2, 2, 3, 3, 8, 8), (2, 5))
    means = result.images.double().mean(dim=(2, 3, 4, 5)).float()
    torch.testing.assert_close(means, result.scores.gather(1, result.order))
    assert torch.equal(result.scores.gather(1, result.order), result.scores.topk(2, dim=1).values)
    path = tmp_path / "run" / "version_0" / "videos" / f"val-reranked-{trainer.global_step}.gif"
    assert path.is_file()
    assert path.with_suffix(".txt").read_text().startswith("a dark field: ")


def test_a_scorer_sees_the_frames_of_a_clip_one_after_the_other() -> None:
    class First(Brightness):
        def score(self, images: Tensor, captions: Sequence[str]) -> Tensor:
            seen.append(images)
            return super().score(images, captions)

    seen: list[Tensor] = []
    callback = CLIPReranking(["dark"], First(), num_candidates=2, keep=2)
    fit(Filmer(), [callback])
    clips = _result(callback).images[0][_result(callback).order[0].argsort()]
    assert torch.equal(seen[0].reshape(2, 3, 3, 8, 8), clips.transpose(1, 2))


def test_equal_scores_keep_their_order() -> None:
    callback = CLIPReranking(["dark"], _Fixed([1.0, 2.0, 2.0, 1.0, 2.0]), num_candidates=5, keep=5)
    fit(Painter(), [callback])
    assert _result(callback).order.tolist() == [[1, 2, 4, 0, 3]]


def test_each_prompt_is_given_once_with_all_of_its_candidates() -> None:
    scorer = Brightness()
    fit(Painter(), [CLIPReranking(PROMPTS, scorer, num_candidates=6, keep=1)])
    assert scorer.captions == PROMPTS


def test_many_candidates_are_drawn_in_several_calls() -> None:
    painter = Painter()
    callback = CLIPReranking(["a", "b", "c"], Brightness(), num_candidates=MAX_CANDIDATES_AT_ONCE // 2, keep=1)
    fit(painter, [callback])
    assert [call["captions"] for call in painter.calls] == [["a", "b"], ["c"]]
    assert _result(callback).scores.shape == (3, MAX_CANDIDATES_AT_ONCE // 2)


def test_learned_scorer_runs_frozen_and_stays_out_of_the_model(tmp_path: Path) -> None:
    scorer = _Learned().train()
    before = {name: tensor.clone() for name, tensor in scorer.state_dict().items()}
    painter = Painter()
    callback = CLIPReranking(PROMPTS, scorer, num_candidates=4, keep=2)
    trainer = fit(painter, [callback], max_epochs=2)
    # Without dropout, and equal at both turns but for the painter's progress.
    expected = scorer.linear(_result(callback).images[0].float().mean(dim=(2, 3)))[:, 0]
    torch.testing.assert_close(_result(callback).scores.gather(1, _result(callback).order)[0], expected)
    assert scorer.training
    torch.testing.assert_close(dict(scorer.state_dict()), before, rtol=0, atol=0)
    assert set(painter.state_dict()) == {"level"}
    trainer.save_checkpoint(tmp_path / "painter.ckpt")
    checkpoint = torch.load(tmp_path / "painter.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == {"level"}
    assert sum(group["params"].__len__() for group in trainer.optimizers[0].param_groups) == 1


def test_contrastive_module_is_a_scorer() -> None:
    torch.manual_seed(0)
    network = ContrastiveConfig(image_size=32, embed_dim=8, vision_width=4, text_tokens=8, text_width=8, text_heads=2)
    scorer = ContrastiveModule(network, tokenizer=CaptionTokenizer.train(PROMPTS, vocabulary_size=280).to_json())
    callback = CLIPReranking(PROMPTS, scorer, num_candidates=3, keep=3)
    fit(Painter(), [callback])
    result = _result(callback)
    torch.testing.assert_close(
        scorer.score(result.images[1], [PROMPTS[1]])[:, 0], result.scores[1, result.order[1]], rtol=0, atol=1e-5
    )


def test_grid_of_the_best_is_logged_with_its_scores(tmp_path: Path) -> None:
    callback = CLIPReranking(PROMPTS, Brightness(), num_candidates=4, keep=2)
    trainer = fit(Painter(), [callback], logger=CSVLogger(tmp_path, name="run", version=0), log_every_n_steps=1)
    path = tmp_path / "run" / "version_0" / "images" / f"val-reranked-{trainer.global_step}.png"
    result = _result(callback)
    assert torch.equal(pil_to_tensor(Image.open(path)), make_grid(result.images.flatten(0, 1), nrow=2))
    best = result.scores[0, result.order[0]].tolist()
    assert path.with_suffix(".txt").read_text().splitlines()[0] == f"a dark field: {best[0]:.3f}, {best[1]:.3f}"


def test_prediction_ranks_too(tmp_path: Path) -> None:
    callback = CLIPReranking(PROMPTS, Brightness(), num_candidates=4, keep=2)
    options = {**QUIET, "logger": CSVLogger(tmp_path, name="run", version=0)}
    Trainer(**options, callbacks=[callback]).predict(Painter(), painted_loader())
    assert _result(callback).images.shape[:2] == (2, 2)
    assert (tmp_path / "run" / "version_0" / "images" / "predict-reranked-0.png").is_file()


def test_scores_that_are_not_finite_are_refused_with_caption_and_step() -> None:
    callback = CLIPReranking(["dark"], _Fixed([1.0, torch.nan]), num_candidates=2, keep=1)
    with pytest.raises(FloatingPointError, match="step 3: scores of 'dark' are not finite"):
        fit(Painter(), [callback])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"captions": "dark"}, TypeError, r"captions \('dark'\) must be a sequence of strings"),
        ({"captions": []}, ValueError, r"captions \(none\) must hold at least one caption"),
        ({"scorer": object()}, TypeError, r"scorer \(object\) must have score\(images, captions\)"),
        ({"keep": 0}, ValueError, r"keep \(0\) must be in 1..num_candidates \(8\)"),
        ({"keep": 9}, ValueError, r"keep \(9\) must be in 1..num_candidates \(8\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CLIPReranking(**{"captions": PROMPTS, "scorer": Brightness(), **arguments})
