"""Frameworks that train, each with PyTorch's wrapper and with ours: bitwise the same weights."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from client_programs import WRAPPERS, backends, batches, need, network, quiet, same_weights, wrapper_in_use
from processes import run_processes

loss_of = nn.functional.cross_entropy


def parameters(module):
    return dict(module.named_parameters())


def train(rank, model, shape, optimizer=None, steps=3):
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    for x, y in batches(rank, shape, steps):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------- accelerate


def accelerated(rank, implementation, way):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    with wrapper_in_use(implementation) as kind:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if way == "accumulate" else 1)
        model, optimizer = network(), None
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert type(model) is kind
        for number, (x, y) in enumerate(batches(rank, (4, 6), 6)):
            if way == "accumulate":
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            with accelerator.no_sync(model) if number % 2 == 0 else contextlib.nullcontext():
                loss = loss_of(model(x), y)
                if number % 2 == 0:
                    with accelerator.trigger_sync_in_backward(model):
                        accelerator.backward(loss)
                else:
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        plain = accelerator.unwrap_model(model)
        assert type(plain) is nn.Sequential
        return parameters(plain)


@backends
@pytest.mark.parametrize("way", ["accumulate", "trigger"])
def test_accelerate(backend, way):
    need("accelerate")
    same_weights(accelerated, backend, way)


# ----------------------------------------------------------------------------------------------- transformers


def tiny_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def texts():
    rows = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **options):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=3,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=1,
        **options,
    )


def trained(rank, implementation, folder):
    from accelerate.state import AcceleratorState
    from transformers import Trainer

    AcceleratorState._reset_state(True)
    with wrapper_in_use(implementation) as kind:
        model = tiny_model()
        trainer = Trainer(model, arguments(folder, gradient_accumulation_steps=2), train_dataset=texts())
        trainer.train()
        assert type(trainer.model_wrapped) is kind
    return parameters(model)


@backends
def test_the_trainer_of_transformers(backend, tmp_path):
    need("transformers")
    same_weights(trained, backend, str(tmp_path))


class OnTwoThreads(lockstep.DataParallel):
    """What the Trainer gets for several devices."""

    def __init__(self, module):
        super().__init__(module, ["cpu", "cpu"])
        self.counts = []

    def forward(self, *args, num_items_in_batch, **kwargs):
        self.counts.append(tuple(num_items_in_batch.shape))
        return super().forward(*args, num_items_in_batch=num_items_in_batch, **kwargs)


def trained_in_one_process(rank, folder):
    """The Trainer wraps a model in DataParallel if it sees several devices; it then counts tokens for each of them."""
    quiet()
    from transformers import Trainer

    results = {}
    for devices in (1, 2):
        model, options = tiny_model().train(), arguments(folder)
        model.config.resid_pdrop = model.config.embd_pdrop = model.config.attn_pdrop = 0.0
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if devices == 1:
            options.per_device_train_batch_size = 4
        options._n_gpu = devices
        with mock.patch.object(nn, "DataParallel", OnTwoThreads):
            trainer = Trainer(model, options, train_dataset=texts())
            options._n_gpu = trainer.args._n_gpu = devices
            trainer.train()
        wrapped = trainer.model_wrapped
        assert isinstance(wrapped, OnTwoThreads) == (devices == 2)
        assert devices == 1 or {shape[0] for shape in wrapped.counts} == {2}
        results[devices] = parameters(model)
    for name, value in results[1].items():
        torch.testing.assert_close(results[2][name], value, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


def test_the_trainer_of_transformers_over_several_devices_in_one_process(tmp_path):
    need("transformers")
    run_processes(1, trained_in_one_process, str(tmp_path), timeout=100)


# -------------------------------------------------------------------------------------------------- Lightning


def lightning_module(manual):
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.automatic_optimization = not manual

        def training_step(self, batch, index):
            x, y = batch
            loss = loss_of(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            self.log("count", torch.tensor(len(x)), sync_dist=True)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Lit()


def data(rank, shape=(4, 6)):
    xs, ys = zip(*batches(rank, shape, 4), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=shape[0])


def with_lightning(rank, implementation, manual, folder):
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    with wrapper_in_use(implementation, "lightning.pytorch.strategies.ddp"):
        module = lightning_module(manual)
        backend = torch.distributed.get_backend()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend=backend),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            accumulate_grad_batches=1 if manual else 2,
            default_root_dir=folder,
        )
        with mock.patch("lightning.pytorch.strategies.ddp._destroy_dist_connection", create=True):
            trainer.fit(module, data(rank))
        return parameters(module.net)


@backends
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning(backend, manual, tmp_path):
    need("lightning")
    same_weights(with_lightning, backend, manual, str(tmp_path))


def with_fabric(rank, implementation):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy

    with wrapper_in_use(implementation, "lightning.fabric.strategies.ddp"):
        backend = torch.distributed.get_backend()
        strategy = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend=backend)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        plain = network()
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
        for number, (x, y) in enumerate(batches(rank, (4, 6), 6)):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(loss_of(model(x), y))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return parameters(plain)


@backends
def test_fabric(backend):
    need("lightning")
    same_weights(with_fabric, backend)


# ----------------------------------------------------------------------------------------------------- ignite


def with_ignite(rank, implementation):
    import ignite.distributed as idist
    from ignite.engine import create_supervised_trainer
    from ignite.metrics import Average

    with wrapper_in_use(implementation) as kind:
        plain = network()
        model = kind(plain)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = create_supervised_trainer(model, optimizer, loss_of)
        Average(output_transform=lambda loss: loss).attach(trainer, "loss")
        if torch.distributed.get_backend() == "gloo":
            assert isinstance(idist.auto_model(network()), kind)
        trainer.run(data(rank), max_epochs=2)
        return parameters(plain)


@backends
def test_ignite(backend):
    need("ignite")
    same_weights(with_ignite, backend)


# ----------------------------------------------------------------------------------------------------- Opacus


def with_opacus(rank, implementation):
    from opacus import PrivacyEngine
    from opacus.optimizers import DistributedDPOptimizer

    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = WRAPPERS[implementation](plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data(rank),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        poisson_sampling=False,
    )
    assert isinstance(optimizer, DistributedDPOptimizer)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return parameters(plain)


@backends
def test_opacus(backend):
    need("opacus")
    same_weights(with_opacus, backend)


# ---------------------------------------------------------------------------------------- networks and metrics


def with_timm(rank, implementation):
    import timm
    import timm.optim
    from timm.utils import ModelEmaV3, unwrap_model

    plain = timm.create_model("test_vit", num_classes=2)
    model = WRAPPERS[implementation](plain)
    assert unwrap_model(model) is plain
    average = ModelEmaV3(model, decay=0.5)
    train(rank, model, (2, 3, 160, 160), timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3), steps=2)
    average.update(model)
    return parameters(plain)


def with_torchvision(rank, implementation):
    import torchvision

    plain = torchvision.models.mobilenet_v3_small(num_classes=2, dropout=0.0)
    train(rank, WRAPPERS[implementation](plain), (4, 3, 32, 32), steps=2)
    return parameters(plain)


def with_peft(rank, implementation):
    import peft

    base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], modules_to_save=["2"], r=2))
    train(rank, WRAPPERS[implementation](model), (4, 6))
    return parameters(model)


def with_geometric(rank, implementation):
    from torch_geometric.nn import GCNConv, Sequential

    edges = torch.tensor([[0, 1, 2, 3, 1, 2], [1, 2, 3, 0, 0, 1]])
    plain = Sequential("x, edges", [(GCNConv(6, 8), "x, edges -> x"), nn.ReLU(), (GCNConv(8, 2), "x, edges -> x")])
    model = WRAPPERS[implementation](plain)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches(rank, (4, 6)):
        optimizer.zero_grad()
        loss_of(model(x, edges), y).backward()
        optimizer.step()
    return parameters(plain)


def with_metrics(rank, implementation):
    import torchmetrics

    plain = network()
    model = WRAPPERS[implementation](plain)
    accuracy, mean = torchmetrics.Accuracy(task="binary"), torchmetrics.MeanMetric()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches(rank, (4 + rank.rank, 6)):
        optimizer.zero_grad()
        out = model(x)
        loss = loss_of(out, y)
        loss.backward()
        optimizer.step()
        accuracy.update(out.argmax(1), y)
        mean.update(loss.detach(), weight=len(x))
    return {**parameters(plain), "accuracy": accuracy.compute(), "mean": mean.compute()}


CLIENTS = {
    "timm": with_timm,
    "torchvision": with_torchvision,
    "peft": with_peft,
    "torch_geometric": with_geometric,
    "torchmetrics": with_metrics,
}


@backends
@pytest.mark.parametrize("client", CLIENTS)
def test_a_step_in_a_program_of(client, backend):
    need(client)
    same_weights(CLIENTS[client], backend)
