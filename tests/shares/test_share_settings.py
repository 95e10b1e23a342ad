"""The settings that bits depend on: what is compared on which devices."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import AgreementError, OptionError
from lockstep.shares.share_settings import check_repeatable, check_settings, settings_of

CUDA = [torch.device("cuda", 0)]


@pytest.fixture
def named(monkeypatch):
    """CUDA devices that have a name on a machine without any."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.fixture
def cudnn():
    """cuDNN's flags, which are as before afterwards."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=True):
        yield torch.backends.cudnn


@pytest.fixture
def flash():
    yield
    torch.backends.cuda.enable_flash_sdp(True)


PRECISION = "precision of float32 in matrix products, convolutions and RNNs"
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CHANGES = {
    PRECISION: (lambda patch: setattr(torch.backends.cudnn, "allow_tf32", False), ["tf32"]),
    "cuBLAS": (lambda patch: patch.setenv(CUBLAS, ":4096:8"), [f"{CUBLAS}=None", f"{CUBLAS}=:4096:8"]),
    "cuDNN": (lambda patch: setattr(torch.backends.cudnn, "deterministic", True), []),
    "backends of attention": (lambda patch: torch.backends.cuda.enable_flash_sdp(False), []),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("named", "cudnn", "flash")
def test_settings_of_cuda_are_compared(name, monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    change, words = CHANGES[name]
    before = settings_of(CUDA)
    change(monkeypatch)
    now = settings_of(CUDA)
    with pytest.raises(AgreementError, match="which changes the bits of each step") as raised:
        check_settings(before, now, 1, "when the module was replicated")
    assert [each for each in before if before[each] != now[each]] == [name]
    assert all(word in str(raised.value) for word in words)


def test_versions_of_cudnn_are_compared(named, cudnn, monkeypatch):
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    assert settings_of(CUDA)["cuDNN"].startswith("91900, ")


def test_kernels_that_are_chosen_by_their_speed_are_refused_on_cuda(cudnn):
    cudnn.benchmark = True
    check_repeatable([torch.device("cpu")])
    with pytest.raises(OptionError, match="benchmark is on"):
        check_repeatable(CUDA)


def test_settings_of_cuda_are_not_compared_on_other_devices(cudnn):
    before = settings_of([torch.device("cpu")])
    cudnn.allow_tf32 = False
    assert settings_of([torch.device("cpu")]) == before


def test_a_precision_that_was_set_for_a_backend_alone_is_no_error(named):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        precision = settings_of(CUDA)[PRECISION]
    finally:
        matmul.fp32_precision = before
    assert precision.startswith("tf32")
