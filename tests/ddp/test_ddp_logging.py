"""What `_get_ddp_logging_data` says, of PyTorch's DistributedDataParallel and of ours."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_reference import Mixed, both_since_2_13, ddp_class
from processes import run_processes
from small_modules import one_weight


def describe(rank, implementation):
    make, seen = ddp_class(implementation), {}
    seen["made"] = make(rank.make(Mixed))._get_ddp_logging_data()
    options = {
        "bucket_cap_mb": 1.5,
        "static_graph": True,
        "gradient_as_bucket_view": True,
        "forward_sync_buffers": False,
    }
    seen["other"] = make(nn.BatchNorm1d(2), **options)._get_ddp_logging_data()
    hooked = make(one_weight())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    seen["hook"] = hooked._get_ddp_logging_data()["comm_hook"]
    with hooked.join():
        hooked(torch.ones(1, 1)).sum().backward()
    seen["joined"] = hooked._get_ddp_logging_data()["join_uneven_inputs"]
    return seen


@both_since_2_13
def test_logging_data(implementation):
    for rank, seen in enumerate(run_processes(2, describe, implementation)):
        wanted = {
            "world_size": 2,
            "rank": rank,
            "module_name": "Mixed",
            "device_ids": "",
            "output_device": -1,
            "num_parameter_tensors": 3,
            "total_parameter_size_bytes": 4 * (3 * 7 + 7 * 5 + 5 * 2),
            "bucket_cap_bytes": 25 * 2**20,
            "broadcast_buffers": 1,
            "find_unused_parameters": 0,
            "gradient_as_bucket_view": 0,
            "is_multi_device_module": 0,
            "iteration": 0,
        }
        assert {name: seen["made"].get(name) for name in wanted} == wanted
        assert not seen["made"].get("static_graph", 0)
        assert "comm_hook" not in seen["made"]
        wanted = {
            "bucket_cap_bytes": int(1.5 * 2**20),
            "static_graph": 1,
            "gradient_as_bucket_view": 1,
            "broadcast_buffers": 0,
            "module_name": "BatchNorm1d",
        }
        assert {name: seen["other"].get(name) for name in wanted} == wanted
        assert seen["hook"] == "allreduce_hook"
        assert seen["joined"] == 1
