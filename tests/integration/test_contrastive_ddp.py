import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule
from tests.ranks import run_ranks
from tests.rounding import assert_only_rounded, flattened

# A vision transformer: batch normalisation on the CPU cannot see the other rank's images.
MODEL_CONFIG: dict[str, Any] = {
    "embed_dim": 8,
    "vision_cfg": {"layers": 1, "width": 8, "head_width": 4, "patch_size": 16, "image_size": 32},
    "text_cfg": {"context_length": 8, "width": 8, "heads": 2, "layers": 1},
}
# The first caption is on both ranks, so that the false negatives of a rank lie on the other.
CAPTIONS = ["a red diamond", "a blue square", "a green diamond", "a red diamond", "a red square", "a blue diamond"]


class _GradientModule(ContrastiveModule):
    """Keeps the gradients of its only step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = {name: parameter.grad.clone() for name, parameter in self.named_parameters()}


def _fit(numbers: list[int], **options: Any) -> tuple[dict[str, Tensor], float]:
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    data: Any = [
        {"image": images[number], "caption": CAPTIONS[number], "negative_caption": f"not {CAPTIONS[number - 1]}"}
        for number in numbers
    ]
    torch.manual_seed(0)
    module = _GradientModule({"model_name": "local-dir:tiny", "model_config": MODEL_CONFIG})
    trainer = Trainer(
        max_steps=1,
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    loader = DataLoader(data, batch_size=len(data))
    trainer.fit(module, loader, loader)
    return module.gradients, trainer.callback_metrics["train/loss"].item()


def _fit_rank(rank: int) -> tuple[dict[str, Tensor], float]:
    # Tells Lightning that the ranks are there already.
    os.environ["LOCAL_RANK"] = str(rank)
    return _fit([3 * rank, 3 * rank + 1, 3 * rank + 2], strategy="ddp", devices=2)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_gradient_on_two_ranks_is_that_of_one_process_on_the_gathered_batch() -> None:
    expected, loss = _fit(list(range(6)), devices=1)
    exact, exact_loss = _fit(list(range(6)), devices=1, precision="64-true")
    ranks = run_ranks(_fit_rank, 2, timeout=180)
    for gradients, _ in ranks:
        assert_only_rounded(flattened(gradients), flattened(expected), flattened(exact))
    mean_loss = sum(rank_loss for _, rank_loss in ranks) / 2
    assert_only_rounded([mean_loss], [loss], [exact_loss])
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
