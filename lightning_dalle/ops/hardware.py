"""What the hardware does fast: the one place that numbers which depend on the machine are taken from."""

import os

import torch

# The instruction sets of oneDNN, which multiplies matrices in bfloat16, that can do so without widening each value.
_ONEDNN_WITH_BFLOAT16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10_1_512", "AVX10_2_512")


def has_fast_bfloat16(device: torch.device | str) -> bool:
    """Tell whether matrices are multiplied faster in bfloat16 than in float32.

    On a CPU this takes instructions of its own, AVX512_BF16 or AMX: without them a bfloat16 product takes about 60
    times as long as one in float32. Limits set by `ATEN_CPU_CAPABILITY`, `DNNL_MAX_CPU_ISA` or `ONEDNN_MAX_CPU_ISA`
    count, since torch keeps to them. Where nothing is known of a device, the answer is no: float32 is fast everywhere.

    Example:
        >>> isinstance(has_fast_bfloat16("cpu"), bool)
        True
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu":
        return False
    # Older versions of torch do not say what the processor can do.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    if not (capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")):
        return False
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")).upper()
    return limit in ("DEFAULT", "ALL") or limit.startswith(_ONEDNN_WITH_BFLOAT16)
