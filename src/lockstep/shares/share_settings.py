"""The settings that the bits depend on: compared between ranks, and with a checkpoint when a run is resumed."""

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lockstep.errors import AgreementError, OptionError

_LIBRARIES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that select other kernels."""
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

_ADVICE = {
    "intra-op threads": "torch.set_num_threads({}), or OMP_NUM_THREADS={} in the environment",
    "deterministic algorithms": "torch.use_deterministic_algorithms()",
    "default dtype": "torch.set_default_dtype({})",
    "float32 matmul precision": "torch.set_float32_matmul_precision({!r})",
    "PyTorch": "install that version",
    "cuBLAS": "set CUBLAS_WORKSPACE_CONFIG in the environment as it was",
    "device": "run on a device of that kind",
    "vector instructions": "run on a processor that has them, or limit all runs with ATEN_CPU_CAPABILITY",
}


def settings_of(devices: Collection[torch.device]) -> dict[str, str]:
    """Return the settings of this process, by name, for a module on these devices."""
    settings = {
        "PyTorch": str(torch.__version__),  # a plain string, which any checkpoint can hold
        "intra-op threads": str(torch.get_num_threads()),
        "deterministic algorithms": _deterministic(),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": _matmul_precision(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "device": ", ".join(sorted({_name_of(device) for device in devices})),
    }
    variables = [f"{name}={os.environ[name]}" for name in _LIBRARIES if name in os.environ]
    settings["oneDNN and MKL"] = ", ".join([f"oneDNN {'on' if torch.backends.mkldnn.enabled else 'off'}", *variables])
    if any(device.type == "cuda" for device in devices):
        settings |= _settings_on_cuda()
    return settings


def _settings_on_cuda() -> dict[str, str]:
    cuda: Any = torch.backends.cuda  # PyTorch declares some of the names
    cudnn: Any = torch.backends.cudnn
    precisions = cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    attention = {
        "flash": cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "cuDNN": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    half = {
        "float16": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bfloat16": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "accumulated in float16": cuda.matmul.allow_fp16_accumulation,
    }
    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": f"{cudnn.version()}, deterministic {cudnn.deterministic}, benchmark {cudnn.benchmark}",
        "precision of float32 in matrix products, convolutions and RNNs": ", ".join(map(str, precisions)),
        "cuBLAS": f"{cuda.preferred_blas_library()}, {_WORKSPACE}={os.environ.get(_WORKSPACE)}",
        "reduced precision of sums in half": ", ".join(f"{name} {value}" for name, value in half.items()),
        "backends of attention": ", ".join(name for name, is_on in attention.items() if is_on),
    }


def check_repeatable(devices: Collection[torch.device]) -> None:
    """Raise :class:`OptionError` if a setting lets each run choose its kernels by their speed."""
    if torch.backends.cudnn.benchmark and any(device.type == "cuda" for device in devices):
        raise OptionError(
            "torch.backends.cudnn.benchmark is on: cuDNN then takes the kernels that were the fastest when they were "
            "tried, so the bits differ from run to run and from rank to rank; set it to False for a module with shares"
        )


def precision_on(device_type: str) -> str:
    """Return the precision in which operations run now."""
    if not torch.is_autocast_enabled(device_type):
        return "no autocast"
    return f"autocast to {torch.get_autocast_dtype(device_type)}"


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it has been set for a backend alone, by fp32_precision
        return "as set for each backend"


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def check_settings(before: Mapping[str, str], now: Mapping[str, str], rank: int, since: str) -> None:
    """Raise :class:`AgreementError` if a setting has changed; ``since`` says when it had its value ``before``."""
    for name, value in before.items():
        if now.get(name, value) != value:
            advice = _ADVICE.get(name, "set it as it was").format(value, value)
            raise AgreementError(
                f"rank {rank}: {since} {name} was {value}, now it is {now[name]}, which changes the bits of each step; "
                f"{advice}, or begin another run"
            )
