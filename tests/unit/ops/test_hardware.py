import warnings

import pytest
import torch

from lightning_dalle.ops.hardware import has_fast_bfloat16, has_fast_float16, product_dtype, warn_if_slow

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


@pytest.mark.parametrize(
    ("capabilities", "limit", "fast"),
    [
        ({"amx_fp16": True}, "ALL", True),
        ({"avx512_fp16": True}, "AVX512_CORE_FP16", True),
        ({"avx512_fp16": True}, "AVX512_CORE_BF16", False),
        (AVX512_BF16, "ALL", False),
        (AVX2, "ALL", False),
    ],
    ids=["amx_fp16", "avx512_fp16", "limited to bfloat16", "bfloat16 alone", "avx2"],
)
def test_float16_takes_instructions_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], limit: str, fast: bool
) -> None:
    pretend(monkeypatch, capabilities)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert has_fast_float16("cpu") is fast
    assert has_fast_float16("cuda")
    assert not has_fast_float16("meta")


def test_16_bit_formats_are_widened_on_a_cpu_that_multiplies_them_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AVX2)
    assert product_dtype(torch.bfloat16, "cpu") == product_dtype(torch.float16, "cpu") == torch.float32
    assert product_dtype(torch.float64, "cpu") == torch.float64
    assert product_dtype(torch.bfloat16, "cuda") == torch.bfloat16
    pretend(monkeypatch, AVX512_BF16)
    assert product_dtype(torch.bfloat16, "cpu") == torch.bfloat16
    assert product_dtype(torch.float16, "cpu") == torch.float32


def test_who_asks_for_a_slow_format_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AVX2)
    with pytest.warns(UserWarning, match="bfloat16 is much slower than float32 on this CPU.*precision='32-true'"):
        warn_if_slow(torch.bfloat16, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_slow(torch.float32, "cpu")
        warn_if_slow(torch.bfloat16, "cuda")
        pretend(monkeypatch, AMX)
        warn_if_slow(torch.bfloat16, "cpu")


def test_the_warning_is_shown_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AVX2)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warn_if_slow(torch.bfloat16, "cpu")
    assert len(shown) == 1
