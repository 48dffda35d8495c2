import pytest
import torch

from lightning_dalle.ops.hardware import has_fast_bfloat16

AMX, AVX512_BF16, AVX512, AVX2 = {"amx_bf16": True}, {"avx512_bf16": True}, {"avx512_f": True}, {"avx2": True}


def pretend(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool] | None, level: str = "AVX512") -> None:
    for name in ("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [(AMX, True), (AVX512_BF16, True), (AVX512, False), (AVX2, False), (None, False)],
    ids=["amx", "avx512_bf16", "avx512", "avx2", "torch does not say"],
)
def test_bfloat16_is_fast_on_a_cpu_with_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool] | None, fast: bool
) -> None:
    pretend(monkeypatch, capabilities)
    assert has_fast_bfloat16("cpu") is fast


def test_a_limit_of_atens_kernels_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMX, level="AVX2")
    assert not has_fast_bfloat16("cpu")


@pytest.mark.parametrize("name", ["DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("limit", "fast"),
    [
        ("AVX2", False),
        ("avx512_core", False),
        ("AVX512_CORE_BF16", True),
        ("avx512_core_amx_fp16", True),
        ("ALL", True),
    ],
)
def test_a_limit_of_onednn_counts(monkeypatch: pytest.MonkeyPatch, name: str, limit: str, fast: bool) -> None:
    pretend(monkeypatch, AMX)
    monkeypatch.setenv(name, limit)
    assert has_fast_bfloat16("cpu") is fast


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_is_asked_itself(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: supported and not including_emulation
    )
    assert has_fast_bfloat16("cuda:0") is supported


def test_other_devices_are_not_trusted() -> None:
    assert not has_fast_bfloat16("meta")
