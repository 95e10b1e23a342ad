"""How long a killed rank costs under torchrun: from SIGKILL to the end of the next step, with two ranks on one host.

Here with run.snapshot() after each step; beside it PyTorch's DDP, which goes on from torch.save() every minute, so that
the steps since then are lost, too: half a minute of training in the mean. Both import PyTorch anew, and torchrun looks
at its processes every tenth of a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

KILLED_AT = 30
SAVE_SECONDS = 60.0
ROUND_SECONDS = 60.0


def note(folder: Path, what: str, step: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(folder / "events", "a") as file:
        file.write(json.dumps([what, attempt, step, time.monotonic()]) + "\n")


def train(name: str, folder: Path) -> None:
    """One rank; the second one kills itself once."""
    note(folder, "begins", 0)
    import torch
    from torch import nn

    torch.set_num_threads(1)
    network = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    note(folder, "imported", 0)
    (with_lockstep if name == "lockstep" else with_ddp)(network, folder)


def step(model: Any, optimizer: Any, folder: Path, number: int) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    note(folder, "step", number)
    if (number, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (KILLED_AT, "1", "0"):
        note(folder, "killed", number)
        os.kill(os.getpid(), signal.SIGKILL)


def with_lockstep(network: Any, folder: Path) -> None:
    import torch

    import lockstep

    with lockstep.session("gloo", "cpu") as run:
        note(folder, "met", 0)
        model = lockstep.replicate(network)
        optimizer = torch.optim.Adam(model.parameters())
        run.resume(folder / "run", model=model, optimizer=optimizer)
        note(folder, "resumed", run.step)
        for number in run.batches(range(run.step + 1, KILLED_AT + 10)):
            step(model, optimizer, folder, number)
            run.snapshot(folder / "run", every=1, model=model, optimizer=optimizer)


def with_ddp(network: Any, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    note(folder, "met", 0)
    model = nn_ddp(network)
    optimizer = torch.optim.Adam(model.parameters())
    file, begin = folder / "checkpoint.pt", 0
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    note(folder, "resumed", begin)
    saved = time.monotonic() - SAVE_SECONDS  # the first step is saved: there is something to load
    for number in range(begin + 1, KILLED_AT + 10):
        step(model, optimizer, folder, number)
        if dist.get_rank() == 0 and time.monotonic() - saved >= SAVE_SECONDS:
            saved = time.monotonic()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}, file)
    dist.barrier()  # a rank that ends while another one still reads from it makes Gloo abort
    dist.destroy_process_group()


def nn_ddp(network: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(network)


def measure(name: str) -> dict[str, float]:
    """Seconds after the kill at which the last rank has come so far; a step counts when the first one has done it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", "--monitor-interval", "0.1", __file__, "--rank", name, folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as launcher:
            try:
                _, errors = launcher.communicate(timeout=ROUND_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)
                errors = f"it hangs after {ROUND_SECONDS:g} s"
        if launcher.returncode:
            print(f"{name}: this round is left out, it has not ended well: {errors[-2000:]}")
            return {}
        events = [json.loads(line) for line in (Path(folder) / "events").read_text().splitlines()]
    killed = next(at for what, _, _, at in events if what == "killed")
    after = [(what, number, at) for what, attempt, number, at in events if attempt == 1]
    told = {
        key: max(at for what, _, at in after if what == key) - killed
        for key in ("begins", "imported", "met", "resumed")
    }
    told["first step"] = min(at for what, _, at in after if what == "step") - killed
    return told | {"steps redone": KILLED_AT - max(number for what, number, _ in after if what == "resumed")}


def main() -> None:
    from harness import arguments, ratio, table

    args = arguments(__doc__, 7)
    found: dict[str, list[dict[str, float]]] = {"lockstep": [], "DDP": []}
    for _ in range(args.rounds):
        for name, measured in found.items():
            measured += filter(None, [measure(name)])
    rows = []
    for name, measured in found.items():
        for key in measured[0] if measured else ():
            values = [each[key] for each in measured]
            rows.append((name, key, f"{median(values):.2f}", f"{max(values):.2f}"))
    table(f"seconds after the kill, {args.rounds} rounds", ["", "", "median", "maximum"], rows)
    if all(found.values()):
        seconds = {name: median(each["first step"] for each in measured) for name, measured in found.items()}
        ratio("lockstep / DDP, to the first step", seconds["lockstep"], seconds["DDP"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
