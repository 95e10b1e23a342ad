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


def changed_by(change):
    """The names of the settings that differ after a change, and what a step says to the first."""
    before = settings_of(CUDA)
    change()
    now = settings_of(CUDA)
    with pytest.raises(AgreementError, match="which changes the bits of each step") as raised:
        check_settings(before, now, 1, "when the module was replicated")
    return [name for name in before if before[name] != now[name]], str(raised.value)


def test_tf32_of_convolutions_is_compared(named, cudnn):
    names, text = changed_by(lambda: setattr(cudnn, "allow_tf32", False))
    assert names == ["precision of float32 in matrix products, convolutions and RNNs"]
    assert "tf32" in text


def test_the_workspace_of_cublas_is_compared(named, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    names, text = changed_by(lambda: monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    assert names == ["cuBLAS"]
    assert "CUBLAS_WORKSPACE_CONFIG=None" in text
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in text


def test_flags_and_versions_of_cudnn_are_compared(named, cudnn, monkeypatch):
    names, _ = changed_by(lambda: setattr(cudnn, "deterministic", True))
    assert names == ["cuDNN"]
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    assert settings_of(CUDA)["cuDNN"].startswith("91900, ")


def test_backends_of_attention_are_compared(named):
    def without_flash():
        torch.backends.cuda.enable_flash_sdp(False)

    try:
        names, _ = changed_by(without_flash)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert names == ["backends of attention"]


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
        precision = settings_of(CUDA)["precision of float32 in matrix products, convolutions and RNNs"]
    finally:
        matmul.fp32_precision = before
    assert precision.startswith("tf32")
