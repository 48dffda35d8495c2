"""AdamW whose moments take two bytes each (Ramesh et al. 2021, section 2.3 and appendix D)."""

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_dalle.ops.finite import to_local
from lightning_dalle.ops.float_formats import FLOAT_0_6_10, FLOAT_1_6_9, SixteenBitFormat, decode, encode

_FORMATS = {"exp_avg": FLOAT_1_6_9, "exp_avg_sq": FLOAT_0_6_10}
# Elements that are worked on together: on a CPU as many as stay in the cache of a core, elsewhere as fill a device.
_CHUNK_ON_CPU, _CHUNK = 2**18, 2**24


class AdamW16(Optimizer):
    """AdamW with the running mean in the 1-6-9 format and the running variance in the 0-6-10 format.

    A step decodes the moments of a chunk, updates in 32 bits and rounds them back, so that a parameter costs 4 bytes of
    state instead of 8. The running variance is clipped by value before use, as in the paper. Parameter groups, learning
    rate schedules and state names are those of `torch.optim.AdamW`, whose state dictionaries can be loaded: here 16-bit
    moments are int16 tensors of the parameter's shape, 32-bit ones are as in torch.

    Rounding moves the variance by up to 2**-11 / (1 - beta2) of it: 1 % at the paper's .96, half of it at .999.

    Args:
        params: As torch takes them. `keep_32bit` needs names: pass `module.named_parameters()`, or groups of them.
        moments: `32bit` keeps all moments as torch does; can differ by group.
        min_16bit_size: Parameters with fewer elements keep 32-bit moments; can differ by group.
        max_variance: Bound of the running variance; None sets none. Can differ by group. With moments in 16 bits they
            are also kept from becoming infinite, by the largest finite value of their format.
        keep_32bit: Regular expression, searched in the names of parameters, of those that keep 32-bit moments. In the
            paper these are gains, biases, embeddings and unembeddings.

    Raises:
        ValueError: If a value is out of range, names are missing for `keep_32bit`, or a beta is so near 1 that a moment
            in 16 bits would never fall, since what it loses in a step is less than half a step of its format.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Literal["16bit", "32bit"] = "16bit",
        min_16bit_size: int = 4096,
        max_variance: float | None = 5.0,
        keep_32bit: str | None = None,
    ) -> None:
        self._keep_32bit = None if keep_32bit is None else re.compile(keep_32bit)
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "min_16bit_size": min_16bit_size,
            "max_variance": max_variance,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, after a look at its settings."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_group(group)
        if self._keep_32bit is not None and "param_names" not in group:
            raise ValueError(
                f"keep_32bit ({self._keep_32bit.pattern!r}) needs the names of parameters; "
                "pass module.named_parameters(), or groups of such pairs"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            packed: list[Tensor] = []
            plain: list[Tensor] = []
            for parameter, is_packed in self._with_forms(group):
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._initialise(parameter, is_packed)
                (packed if is_packed else plain).append(parameter)
            scratch = _scratch_of(packed)
            for parameter in packed:
                self._update_packed(parameter, group, scratch[parameter.device])
            self._update_plain(plain, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.optim.AdamW`; moments take the form that the settings ask for."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for (parameter, is_packed), key in zip(self._with_forms(group), saved_group["params"], strict=True):
                for name, float_format in _FORMATS.items() if key in saved_state else ():
                    # torch has cast it to the parameter's type, which is no way to treat a code.
                    moment = saved_state[key][name].detach().to(parameter.device, copy=True)
                    self.state[parameter][name] = _in_form(moment, is_packed, float_format, parameter.dtype)

    def _with_forms(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        """Yield each parameter of a group, and whether its moments are in 16 bits."""
        names = group.get("param_names", [""] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            kept = self._keep_32bit is not None and self._keep_32bit.search(name) is not None
            large = parameter.numel() >= group["min_16bit_size"]
            yield parameter, group["moments"] == "16bit" and large and not kept and parameter.dtype != torch.float64

    def _initialise(self, parameter: Tensor, is_packed: bool) -> None:
        state = self.state[parameter]
        state["step"] = torch.tensor(0.0)
        for name in _FORMATS:
            # Code 0 is 0.
            dtype = torch.int16 if is_packed else parameter.dtype
            state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)

    def _update_packed(self, parameter: Tensor, group: dict[str, Any], scratch: Tensor) -> None:
        state = self.state[parameter]
        state["step"] += 1
        local = _local(parameter)
        flat = local.reshape(-1)
        tensors = (flat, _local(parameter.grad).reshape(-1), *(_local(state[name]).view(-1) for name in _FORMATS))
        step = state["step"].item()
        chunks = zip(*(part.split(_chunk_size(flat.device)) for part in tensors), strict=True)
        for values, gradient, mean_codes, variance_codes in chunks:
            room = scratch[:, : values.numel()]
            # They hold no infinity; a NaN need not be kept, for it is in the parameter too.
            mean = decode(mean_codes, FLOAT_1_6_9, finite=True, out=room[0])
            variance = decode(variance_codes, FLOAT_0_6_10, finite=True, out=room[1])
            wide = values.float()
            _update_moments([gradient.float()], [mean], [variance], group)
            # A moment that became infinite would stay so for ever.
            encode(mean, FLOAT_1_6_9, saturate=True, out=mean_codes, scratch=room[2:])
            encode(variance, FLOAT_0_6_10, saturate=True, out=variance_codes, scratch=room[2:])
            _update_values([wide], [mean], [variance.sqrt_()], step, group)
            if wide is not values:
                values.copy_(wide)
        if flat.data_ptr() != local.data_ptr():
            local.copy_(flat.view(local.shape))

    def _update_plain(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        by_kind: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            self.state[parameter]["step"] += 1
            kind = (parameter.device, parameter.dtype, self.state[parameter]["step"].item())
            by_kind.setdefault(kind, []).append(parameter)
        for (_, _, step), alike in by_kind.items():
            means, variances = ([_local(self.state[item][name]) for item in alike] for name in _FORMATS)
            gradients = [_local(parameter.grad) for parameter in alike]
            _update_moments(gradients, means, variances, group)
            values = [_local(parameter) for parameter in alike]
            _update_values(values, means, list(torch._foreach_sqrt(variances)), step, group)


def _update_moments(
    gradients: list[Tensor], means: list[Tensor], variances: list[Tensor], group: dict[str, Any]
) -> None:
    """Update the moments in place, with the operations of torch's foreach AdamW, and clip the variances."""
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(variances, beta2)
    torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
    if group["max_variance"] is not None:
        torch._foreach_clamp_max_(variances, group["max_variance"])


def _update_values(
    values: list[Tensor], means: list[Tensor], denominators: list[Tensor], step: float, group: dict[str, Any]
) -> None:
    """Update the parameters in place, as torch does; `denominators`, the roots of the variances, are overwritten."""
    (beta1, beta2), learning_rate = group["betas"], group["lr"]
    if group["weight_decay"] != 0:
        torch._foreach_mul_(values, 1 - learning_rate * group["weight_decay"])
    torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(values, means, denominators, -learning_rate / (1 - beta1**step))


def _chunk_size(device: torch.device) -> int:
    return _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK


def _scratch_of(parameters: list[Tensor]) -> dict[torch.device, Tensor]:
    """Four chunks of memory on each device: two moments of the largest parameter, and room to encode them.

    Without it each chunk would allocate its own, and on a CPU the system would hand out most of it page by page. It
    lives as long as a step, so that the optimizer can be copied and saved without it.
    """
    sizes: dict[torch.device, int] = {}
    for parameter in parameters:
        device = parameter.device
        size = min(_local(parameter).numel(), _chunk_size(device))
        sizes[device] = max(size, sizes.get(device, 0))
    return {device: torch.empty(4, size, dtype=torch.float32, device=device) for device, size in sizes.items()}


def _in_form(moment: Tensor, is_packed: bool, float_format: SixteenBitFormat, dtype: torch.dtype) -> Tensor:
    if is_packed == (moment.dtype == torch.int16):
        return moment if is_packed else moment.to(dtype)
    if is_packed:
        return encode(moment.float(), float_format, saturate=True)
    return decode(moment, float_format).to(dtype)


def _local(tensor: Tensor | None) -> Tensor:
    """This rank's part of a tensor: all elements are updated alike, so nobody needs the others."""
    assert tensor is not None
    return to_local(tensor)


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay", "min_16bit_size"):
        if not group[name] >= 0:
            raise ValueError(f"{name} ({group[name]}) must be at least 0")
    if group["moments"] not in ("16bit", "32bit"):
        raise ValueError(f"moments ({group['moments']!r}) must be '16bit' or '32bit'")
    if group["max_variance"] is not None and not group["max_variance"] > 0:
        raise ValueError(f"max_variance ({group['max_variance']}) must be positive, or None for no bound")
    for beta, (name, float_format) in zip(group["betas"], _FORMATS.items(), strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"betas ({group['betas']}) must be in [0, 1)")
        # Half a step, next to the value that has the fewest steps below it.
        most = 1 - 2.0 ** -(float_format.fraction_bits + 1)
        if group["moments"] == "16bit" and beta > most:
            raise ValueError(
                f"beta ({beta}) of {name} must be at most {most} with moments in 16 bits, which could not follow it; "
                "lower it, or set moments='32bit'"
            )
