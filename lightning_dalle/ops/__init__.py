"""Pure functions on tensors: no module, no process group, no Lightning."""
