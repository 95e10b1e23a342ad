"""Programs of frameworks, started by `lockstep run` in two processes: those of docs/recipes.md, and unchanged ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from client_programs import need

TESTS = Path(__file__).parents[1]
RECIPES = (TESTS.parent / "docs" / "recipes.md").read_text()
PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```$", RECIPES, re.M | re.S))
CLIENTS = {"Accelerate": "accelerate", "Lightning Fabric": "lightning", "The Trainer of transformers": "transformers"}
QUIETLY = "import client_programs; client_programs.quiet()\n"


def output_of(program: str, folder: Path, *options: str) -> str:
    """Return what a program prints that `lockstep run` has started."""
    (folder / "train.py").write_text(QUIETLY + program)
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "LOCKSTEP_TEST_RANK": "1",
    }  # those of client_programs start nothing
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--ranks", "2", *options, "train.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_recipe_is_tested():
    assert PROGRAMS.keys() == CLIENTS.keys()
    for recipe, program in PROGRAMS.items():
        compile(program, recipe, "exec")


@pytest.mark.parametrize("recipe", CLIENTS)
def test_a_recipe_of_the_documentation(recipe, tmp_path):
    need(CLIENTS[recipe])
    output = output_of(PROGRAMS[recipe], tmp_path)
    assert re.findall(r"^\[rank \d\] trained by ([\w.]+)$", output, re.M) == [
        "lockstep.distributed.replication.ddp"
    ]  # one rank prints


# -------------------------------------------------------------------------- programs that know nothing of the library

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
texts = [{"input_ids": row, "labels": row} for row in torch.randint(32, (64, 8))]
options = dict(use_cpu=True, max_steps=3, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True)
trainer = Trainer(model, TrainingArguments("trained", **options), train_dataset=texts)
trainer.train()
wrapper = trainer.model_wrapped
"""

LIGHTNING = """
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_end(self):
        global wrapper
        wrapper = self.trainer.strategy.model

torch.manual_seed(0)
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **options)
trainer.fit(Lit(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
"""

TOLD = """
import torch.distributed as dist
rounds = ""
if type(wrapper).__module__.startswith("lockstep"):
    import lockstep
    lockstep.check_in_sync(wrapper)
    rounds = lockstep.loop.statistics(wrapper).rounds
if dist.get_rank() == 0:
    print("wrapped by", type(wrapper).__module__, dist.get_backend(), rounds)
"""


@pytest.mark.parametrize(
    ("client", "program", "rounds"),
    [("transformers", TRAINER, 3), ("lightning", LIGHTNING, 2)],
    ids=["Trainer", "Lightning"],
)
def test_a_program_is_patched_from_outside(client, program, rounds, tmp_path):
    need(client)
    output = output_of(program + TOLD, tmp_path, "--patch", "--backend", "shm")
    assert f"wrapped by lockstep.distributed.replication.ddp shm {rounds}\n" in output
