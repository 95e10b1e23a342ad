"""The processes of a check: each builds the case, trains its steps, and records gradients, weights and buffers."""

import contextlib
import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

import lockstep
from lockstep._base.tree import tree_map
from lockstep.check.case import Case, batches_of_rank, build, make_optimizer, run_step, whole_batches
from lockstep.check.dropout import Dropout
from lockstep.check.job import CheckOptions, CheckStep, Job, JobRecord, Tensors
from lockstep.check.rows import digests_of
from lockstep.check.wrapping import WRAPS, named_inside, whole

_SEED = 0x10C57E9  # of the function that builds the case; a program that seeds is unlikely to take the same


def serve(folder: Path) -> None:
    """Fork a process for each job that a line of the standard input names, until it is closed.

    What the first job's case imports is imported here, once for all. Nothing is computed here, so processes may be
    forked.
    """
    sys.path[:] = pickle.loads((folder / "path").read_bytes())
    torch.set_num_threads(1)
    running: dict[int, int] = {}
    for line in sys.stdin:
        numbers = [int(each) for each in line.split()]
        with contextlib.suppress(Exception):  # the processes of the jobs raise it again, and record it
            _import(_job(folder, numbers[0]).options)
        for number in numbers:
            process = os.fork()
            if not process:
                _do(folder, number, store=folder / f"store{numbers[0]}")
            (folder / f"{number}.pid").write_text(str(process))
            running[process] = number
        while running:
            process, status = os.wait()
            ended = folder / f"{running.pop(process)}.ended"
            ended.with_suffix(".unfinished").write_text(str(os.waitstatus_to_exitcode(status)))
            ended.with_suffix(".unfinished").rename(ended)


_OF_WRAPS = {"fsdp2": "torch.distributed.fsdp", "accelerate": "accelerate"}


def _import(options: CheckOptions) -> None:
    """Import what the processes of a check would import each for itself."""
    importlib.import_module("torch._dynamo")  # which optimizers and PyTorch's wrapper take a second for
    if isinstance(options.wrap, str) and options.wrap in _OF_WRAPS:
        importlib.import_module(_OF_WRAPS[options.wrap])
    options.case.load()


def _job(folder: Path, number: int) -> Job:
    job: Job = pickle.loads((folder / f"{number}.job").read_bytes())
    return job


def _do(folder: Path, number: int, store: Path) -> NoReturn:
    log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # before it is ended because it takes too long
    job, record = _job(folder, number), JobRecord()
    try:
        _join(job, store if job.place[1] > 1 else folder / f"store{number}alone")
        _train(job, record)
    except Exception as error:  # of the program, which the command shows
        record.error = "".join(traceback.format_exception(error)).strip()
    torch.save(record, folder / f"{number}.writing")
    (folder / f"{number}.writing").rename(folder / f"{number}.record")
    os._exit(0)  # ranks that have failed are not waited for


def _join(job: Job, store: Path) -> None:
    rank, world = job.place
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # read by some frameworks, though the group is there
    dist.init_process_group(job.options.backend, init_method=f"file://{store}", rank=rank, world_size=world)


def _train(job: Job, record: JobRecord) -> None:
    options = job.options
    _seed(_SEED)
    case = build(options.case)
    model = case.model.double() if options.precision == "float64" else case.model
    record.draws_rows = callable(case.batches)
    record.has_both = case.step is not None and case.loss is not None
    record.batch_norms = [n for n, each in model.named_modules() if _has_batch_statistics(each)]
    if torch.initial_seed() == _SEED:  # the program has left it to the check
        _seed(_SEED + 1 + (0 if options.dropout == "rows" else job.place[0]))
    _Recorder(job, case, model, record).run()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _has_batch_statistics(module: Module) -> bool:
    synchronised = isinstance(module, lockstep.local.SyncBatchNorm | torch.nn.SyncBatchNorm)
    return isinstance(module, _BatchNorm) and not synchronised and module.training


class _Recorder:
    """Trains the steps of a job, and records them."""

    def __init__(self, job: Job, case: Case, model: Module, record: JobRecord) -> None:
        self.job = job
        self.case = case
        self.record = record
        self.options: CheckOptions = job.options
        self.step = CheckStep()
        alone = job.place[1] == 1
        names = [name for name, _ in model.named_parameters()]
        if alone:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._noting(name))
            self._note_after_backward(model)
        is_plain = case.step is None or (job.rank is None and case.loss is not None and not job.by_step)
        self.model = model if alone and is_plain else self._wrap()(model)
        self.named = model if self.model is model else named_inside(self.model, names)
        self.optimizer = make_optimizer(case, self.model.parameters())
        self.optimizer.register_step_pre_hook(self._before_step)

    def _wrap(self) -> Callable[[Module], Module]:
        wrap = self.options.wrap
        return WRAPS[wrap] if isinstance(wrap, str) else wrap.load()

    def run(self) -> None:
        self.record.weights, self.record.buffers = self._weights(), self._buffers()
        with Dropout(self.options.dropout) as dropout:
            for batch in self._batches():
                self._run_step(batch, dropout)

    def _run_step(self, batch: Any, dropout: Dropout) -> None:
        has_samples = self.case.collate is not None
        self.step = CheckStep(rows=digests_of(batch, has_samples))
        dropout.begin(self.step.rows)
        batch = tree_map(self._converted, batch)
        with self._autocast():
            run_step(self.case, self.model, self.optimizer, batch, of_one_process=self._is_whole())
        self.step.drawn_from = dropout.drawn_from
        self.step.weights, self.step.buffers = self._weights(), self._buffers()
        self.record.steps.append(self.step)

    def _is_whole(self) -> bool:
        job = self.job
        if job.by_step:
            return False
        return job.rank is None or (job.alone is not None and len(self.record.steps) < job.alone)

    def _batches(self) -> Iterator[Any]:
        job, ranks, split = self.job, self.options.ranks, self.options.split
        if job.rank is None:
            return whole_batches(self.case, ranks, split)
        own = batches_of_rank(self.case, job.rank, ranks, split)
        if job.alone is None:
            return own
        return self._then_own(whole_batches(self.case, ranks, split), own, job.alone)

    @staticmethod
    def _then_own(whole: Iterator[Any], own: Iterator[Any], last: int) -> Iterator[Any]:
        for number, (of_all, of_rank) in enumerate(zip(whole, own, strict=False)):
            if number == last:
                yield of_rank
                return
            yield of_all

    def _converted(self, leaf: Any) -> Any:
        if self.options.precision == "float64" and isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.double()
        return leaf

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.options.precision == "bf16":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.step.backward[name] = parameter.grad.detach().clone()

        return note

    def _note_after_backward(self, model: Module) -> None:
        backward = torch.autograd.backward

        def noting(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            grads = {name: each.grad for name, each in model.named_parameters()}
            self.step.after = {name: whole(grad) for name, grad in grads.items() if grad is not None}

        torch.autograd.backward = noting  # of this process, which trains this case and ends

    def _before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.step.gradients = {
            name: None if each.grad is None else whole(each.grad)
            for name, each in self.named.named_parameters()
            if each.requires_grad
        }

    def _weights(self) -> Tensors:
        return {name: whole(each) for name, each in self.named.named_parameters()}

    def _buffers(self) -> Tensors:
        return {name: whole(each) for name, each in self.named.named_buffers()}


if __name__ == "__main__":
    assert lockstep.__version__  # registers the shm backend
    serve(Path(sys.argv[1]))
