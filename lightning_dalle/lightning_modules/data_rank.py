"""Which part of the data a process trains on."""

from lightning.pytorch import LightningModule


def data_rank(module: LightningModule) -> int:
    """Number of the process among those that get different samples; 0 without a Trainer.

    Processes that share samples, as the parts of one sequence do, so draw the same random numbers.
    """
    shares = None if module._trainer is None else module._trainer.distributed_sampler_kwargs
    return 0 if shares is None else int(shares["rank"])
