"""PowerSGD: low-rank compression of gradients between machines."""
