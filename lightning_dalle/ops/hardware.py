"""What the hardware does fast: the one place that numbers which depend on the machine are taken from."""

import os
import warnings
from typing import Any

import torch

# For each 16-bit format: what a processor needs to multiply matrices in it without widening each value, and the limits
# of oneDNN, which multiplies them, that leave it so.
_CAPABILITIES = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16"),
}
_ONEDNN_LIMITS = {
    torch.bfloat16: ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10_1_512", "AVX10_2_512"),
    torch.float16: ("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10_1_512", "AVX10_2_512"),
}


def has_fast_bfloat16(device: torch.device | str) -> bool:
    """Tell whether matrices are multiplied faster in bfloat16 than in float32.

    On a CPU this takes instructions of its own, AVX512_BF16 or AMX: without them a bfloat16 product takes tens
    of times as long as one in float32 (docs/number_formats.md). Limits
    set by `ATEN_CPU_CAPABILITY`, `DNNL_MAX_CPU_ISA` or `ONEDNN_MAX_CPU_ISA`
    count, since torch keeps to them. Where nothing is known of a device, the answer is no: float32 is fast everywhere.

    Example:
        >>> isinstance(has_fast_bfloat16("cpu"), bool)
        True
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and _cpu_multiplies_fast(torch.bfloat16)


def has_fast_float16(device: torch.device | str) -> bool:
    """Tell whether matrices are multiplied faster in float16 than in float32: as `has_fast_bfloat16`.

    On a CPU this takes AVX512_FP16 or AMX_FP16, which fewer have than have those of bfloat16.
    """
    kind = torch.device(device).type
    return kind == "cuda" or (kind == "cpu" and _cpu_multiplies_fast(torch.float16))


def product_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """Return the number format in which to multiply values of `dtype`.

    It is `dtype` itself, but for the 16-bit formats on a CPU without instructions for them, which is float32.

    Example:
        >>> product_dtype(torch.float64, "cpu")
        torch.float64
    """
    if torch.device(device).type != "cpu" or dtype not in _CAPABILITIES:
        return dtype
    return dtype if _cpu_multiplies_fast(dtype) else torch.float32


def warn_if_slow(dtype: torch.dtype, device: torch.device | str) -> None:
    """Warn whoever asked for a number format that is much slower than float32 on a CPU; it is used all the same."""
    if product_dtype(dtype, device) != dtype:
        name = str(dtype).removeprefix("torch.")
        # Of this line, so that Python shows it once a process, whoever asks.
        warnings.warn(
            f"{name} is much slower than float32 on this CPU, which has no instructions for it; use "
            "precision='32-true', or dtype='float32' of PerBlockGradientScaling (docs/number_formats.md)",
            stacklevel=1,
        )


def _cpu_multiplies_fast(dtype: torch.dtype) -> bool:
    # Older versions of torch do not say what the processor can do.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not any(capabilities.get(name) for name in _CAPABILITIES[dtype]):
        return False
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")).upper()
    return limit in ("DEFAULT", "ALL") or limit.startswith(_ONEDNN_LIMITS[dtype])
