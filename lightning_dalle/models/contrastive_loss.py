"""The contrastive loss over the batches of all ranks, without the false negatives of repeated captions."""

import open_clip
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy


class RepeatedCaptionClipLoss(open_clip.ClipLoss):
    """open_clip's `ClipLoss`, in which an image and another image's equal caption are no negatives of each other.

    In sets with few distinct captions a batch repeats them; each repeat would be pushed away as a negative although it
    describes the image. Such pairs are left out of both softmaxes; without repeats the loss is `ClipLoss` exactly.

    Features are gathered over the default process group with their gradient, each rank computes its own rows, and so
    the mean over ranks (what DDP takes) of value and gradient is that of one process on the joined batch. All ranks
    must bring batches of equal size.

    Args:
        rank: Of this process.
        world_size: Number of processes.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)

    def forward(
        self,
        image_features: Float[Tensor, "batch features"],
        text_features: Float[Tensor, "batch features"],
        logit_scale: Float[Tensor, "..."],
        text_tokens: Int[Tensor, "batch text"],
        logit_bias: Float[Tensor, "..."] | None = None,
        negative_features: Float[Tensor, "batch features"] | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the loss and the share of images whose best text of all ranks is their caption.

        Args:
            text_tokens: The captions; equal rows are repeats of one caption.
            negative_features: Of a text for each image that is nearly its caption and wrong. It joins the image's own
                softmax, not the accuracy (NegCLIP, Yuksekgonul et al. 2023, section 4).
        """
        image_logits, text_logits = self.get_logits(image_features, text_features, logit_scale, logit_bias)
        labels = self.get_ground_truth(image_logits.device, len(image_logits))
        same = (text_tokens.unsqueeze(1) == self._gather(text_tokens)).all(dim=2)
        accuracy = same.gather(1, image_logits.argmax(dim=1, keepdim=True)).float().mean()
        repeats = same.scatter(1, labels.unsqueeze(1), False)
        image_logits = image_logits.masked_fill(repeats, -torch.inf)
        if negative_features is not None:
            negatives = logit_scale * (image_features * negative_features).sum(dim=1, keepdim=True)
            negatives = negatives if logit_bias is None else negatives + logit_bias
            image_logits = torch.cat([image_logits, negatives], dim=1)
        image_loss = cross_entropy(image_logits, labels)
        text_loss = cross_entropy(text_logits.masked_fill(repeats, -torch.inf), labels)
        return (image_loss + text_loss) / 2, accuracy

    def _gather(self, text_tokens: Tensor) -> Tensor:
        if self.world_size == 1:
            return text_tokens
        gathered = [torch.empty_like(text_tokens) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, text_tokens.contiguous())
        return torch.cat(gathered)
