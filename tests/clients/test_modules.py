"""Modules that other people's packages make, replicated: their classes stay, they train as in one process, and what
they save loads without lockstep."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import lockstep
from client_programs import equal, in_one_process, need, quiet, trains_like, without_lockstep
from processes import run_processes
from threaded import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of clients


@pytest.fixture(autouse=True)
def _quiet():
    quiet()


def made(factory, seed=0):
    torch.manual_seed(seed)
    return factory()


def random(*shape, steps=2, world=2, dtype=None):
    """A tensor for each rank in each step."""
    generator = torch.Generator().manual_seed(7)
    return [[torch.randn(shape, generator=generator, dtype=dtype) for _ in range(world)] for _ in range(steps)]


def replicas(factory, world=2):
    """A module for each rank, with other values: rank 0's count. Made in one thread, as tracing patches all modules."""
    return [made(factory, seed) for seed in range(world)]


def mean_square(module, x):
    return module(x).square().mean()


def unchanged(module):
    pass


def trains(factory, loss_of, batches, change=unchanged, tolerance=0.0):
    """Replicates what the factory makes over two ranks, and trains it as in one process. Those modules and the copies.

    After one pass, each module is changed, if it is said how.
    """
    modules, copies = replicas(factory), [made(factory) for _ in range(2)]
    for module in copies:
        change(module)
    steps = in_one_process(copies, loss_of, batches)

    def work(rank):
        module = modules[rank.rank]
        kind = type(module)
        assert lockstep.replicate(module, process_group=rank.group) is module
        assert type(module) is kind
        if change is not unchanged:
            loss_of(module, batches[0][rank.rank]).backward()
            change(module)
        trains_like(steps, rank, module, loss_of, batches, tolerance)

    run_ranks(2, work)
    return modules, copies


# ---------------------------------------------------------------------------------------------------- saving


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **dropouts
    )
    return GPT2LMHeadModel(config)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def tokens(steps=2, world=2):
    generator = torch.Generator().manual_seed(3)
    return [[torch.randint(0, 32, (2, 8), generator=generator) for _ in range(world)] for _ in range(steps)]


def gpt2_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def bert_loss(model, ids):
    return model(input_ids=ids, labels=ids[:, 0] % 2).loss


def test_a_replicated_transformer_generates_and_is_checkpointed():
    need("transformers")
    first = trains(lambda: _checkpointed(gpt2()), gpt2_loss, tokens())[0][0]
    ids = tokens()[0][0][:, :4]
    texts = [
        model.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        for model in (first, copy.deepcopy(first))
    ]
    assert torch.equal(*texts)


def _checkpointed(model):
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    return model


def unet():
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def noise_loss(model, x):
    from diffusers import DDPMScheduler

    noise = x.flip(0)
    times = torch.tensor([3, 500])
    noisy = DDPMScheduler(num_train_timesteps=1000).add_noise(x, noise, times)
    return nn.functional.mse_loss(model(noisy, times, return_dict=False)[0], noise)


LOAD = """
import diffusers, json, transformers
close = torch.testing.assert_close
folder = sys.argv[1]
for auto, kind in json.load(open(folder + "/kinds.json")):
    ids, wanted = torch.load(f"{folder}/{kind}.pt")
    saved = getattr(transformers, auto).from_pretrained(f"{folder}/{kind}")
    for model in (saved, torch.load(f"{folder}/{kind}.whole", weights_only=False)):
        assert type(model).__name__ == kind, type(model)
        close(model.eval()(input_ids=ids).logits, wanted)
x, wanted = torch.load(folder + "/unet.pt")
for model in (
    diffusers.UNet2DModel.from_pretrained(folder + "/unet"),
    diffusers.UNet2DModel.from_pretrained(folder + "/average"),
    diffusers.DDPMPipeline.from_pretrained(folder + "/pipeline").unet,
    torch.load(folder + "/unet.whole", weights_only=False),
):
    assert type(model) is diffusers.UNet2DModel, type(model)
    close(model.eval()(x, 3).sample, wanted)
"""


def test_what_is_saved_loads_without_lockstep(tmp_path):
    """By the names of the classes in what `save_pretrained` writes, and in pickles."""
    need("diffusers")
    from diffusers import DDPMPipeline, DDPMScheduler
    from diffusers.training_utils import EMAModel

    kinds = []
    for factory, loss_of, auto in (
        (gpt2, gpt2_loss, "AutoModelForCausalLM"),
        (bert, bert_loss, "AutoModelForSequenceClassification"),
    ):
        model = trains(factory, loss_of, tokens())[0][0].eval()
        kind = factory().__class__.__name__
        model.save_pretrained(tmp_path / kind)
        assert json.loads((tmp_path / kind / "config.json").read_text())["architectures"] == [kind]
        ids = tokens()[0][0]
        torch.save((ids, model(input_ids=ids).logits.detach()), tmp_path / f"{kind}.pt")
        torch.save(model, tmp_path / f"{kind}.whole")
        kinds.append((auto, kind))
    (tmp_path / "kinds.json").write_text(json.dumps(kinds))

    model = trains(unet, noise_loss, random(2, 1, 8, 8))[0][0].eval()
    average = EMAModel(model.parameters(), decay=0.0, model_cls=type(model), model_config=model.config)
    average.step(model.parameters())
    average.save_pretrained(tmp_path / "average")
    model.save_pretrained(tmp_path / "unet")
    assert json.loads((tmp_path / "unet" / "config.json").read_text())["_class_name"] == "UNet2DModel"
    DDPMPipeline(model, DDPMScheduler()).save_pretrained(tmp_path / "pipeline")
    x = random(2, 1, 8, 8)[0][0]
    torch.save((x, model(x, 3).sample.detach()), tmp_path / "unet.pt")
    torch.save(model, tmp_path / "unet.whole")
    without_lockstep(LOAD, str(tmp_path))


# ------------------------------------------------------------------------------------- sentence-transformers


def sentences():
    """Word embeddings, their mean, and a layer, as its documentation builds models."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

    words = ["a", "cat", "dog", "sat", "ran", "on", "the", "mat"]
    tokenizer = WhitespaceTokenizer(vocab=words, stop_words=set())
    weights = torch.randn(len(words), 6).tolist()
    embeddings = modules.WordEmbeddings(tokenizer=tokenizer, embedding_weights=weights, update_embeddings=True)
    pooling = modules.Pooling(embeddings.get_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(
        modules=[embeddings, pooling, modules.Dense(6, 4, activation_function=nn.Tanh())], device="cpu"
    )


def pairs(steps=2, world=2):
    given = ["a cat sat", "the dog ran", "on the mat", "a dog sat", "the cat ran", "a mat"]
    texts = [[given[(step + rank + k) % 6] for k in range(6)] for step in range(steps) for rank in range(world)]
    return [texts[step * world : (step + 1) * world] for step in range(steps)]


def in_batch_negatives(model, texts):
    from sentence_transformers.sentence_transformer import losses

    features = [model.preprocess(texts[:3]), model.preprocess(texts[3:])]
    return losses.MultipleNegativesRankingLoss(model)(features, torch.zeros(3))


def similarity(model, texts):
    from sentence_transformers.sentence_transformer import losses

    features = [model.preprocess(texts[:3]), model.preprocess(texts[3:])]
    return losses.CosineSimilarityLoss(model)(features, torch.tensor([0.1, 0.5, 0.9]))


@pytest.mark.parametrize("loss_of", [in_batch_negatives, similarity])
def test_a_sentence_transformer(loss_of, tmp_path):
    need("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    model = trains(sentences, loss_of, pairs())[0][0]
    wanted = model.encode(["a cat sat"])
    model.save(str(tmp_path), create_model_card=False)
    assert "Replicated" not in "".join(path.read_text() for path in tmp_path.glob("**/*.json"))
    assert (SentenceTransformer(str(tmp_path), device="cpu").encode(["a cat sat"]) == wanted).all()


# --------------------------------------------------------------------------------------------------- torch.fx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def traced():
    return torch.fx.symbolic_trace(Net())


def edit(module):
    """As torch.fx's documentation does, with tanh in relu's place."""
    for node in module.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
    module.graph.lint()
    module.recompile()


def _in_between(module):
    """tanh after the first layer, by inserting a call of a new submodule."""
    module.add_submodule("between", nn.Tanh())
    for node in list(module.graph.nodes):
        if node.target == "first":
            with module.graph.inserting_after(node):
                new = module.graph.call_module("between", (node,))
            node.replace_all_uses_with(new)
            new.args = (node,)
    module.recompile()


def _set_graph(module):
    module.graph = module.graph


@pytest.mark.parametrize("change", [edit, _in_between, _set_graph, torch.fx.GraphModule.recompile])
def test_an_edited_graph(change):
    """Before and after the edit, module and copies run what the graph says, and train as in one process."""
    x = random(3, 4)
    modules, copies = trains(traced, mean_square, x, change)
    copied = copies_of(modules[0])
    assert [type(one).__name__ for one in copied] == [type(one).__name__ for one in copies_of(copies[0])]
    for one in copied:
        equal(one(x[0][0]), modules[0](x[0][0]), "a copy")
        change(one)
        mean_square(one, x[0][0]).backward()  # of this process alone
    torch.fx.symbolic_trace(modules[0])(x[0][0])
    torch.fx.Interpreter(modules[0]).run(x[0][0])


def copies_of(module):
    torch.save(module, buffer := io.BytesIO())
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    return [copy.deepcopy(module), copy.deepcopy(copy.deepcopy(module)), pickle.loads(pickle.dumps(module)), loaded]


def exported():
    return torch.export.export(Net(), (torch.randn(3, 4),)).module()


def test_an_exported_module():
    module = trains(exported, mean_square, random(3, 4))[0][0]
    x = random(3, 4)[0][0]
    equal(copy.deepcopy(module)(x), module(x), "a copy")


# ------------------------------------------------------------------------ quantization-aware training


def prepared_graph():
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    return prepare_qat_fx(Net().train(), get_default_qat_qconfig_mapping("x86"), (torch.randn(3, 4),))


def converted_graph(module):
    from torch.ao.quantization.quantize_fx import convert_fx

    return convert_fx(copy.deepcopy(module).eval())


def prepared_eager():
    from torch.ao import quantization

    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant, self.net, self.dequant = quantization.QuantStub(), Net(), quantization.DeQuantStub()
            self.net.forward = None
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x):
            return self.dequant(self.net(self.quant(x)))

    module = Quantized().train()
    module.qconfig = quantization.get_default_qat_qconfig("x86")
    return quantization.prepare_qat(module)


def converted_eager(module):
    from torch.ao import quantization

    return quantization.convert(copy.deepcopy(module).eval())


def prepared_by_torchao():
    need("torchao")
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
    from torchao.quantization.qat import QATConfig

    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    quantize_(net, QATConfig(config, step="prepare"))
    return net


def converted_by_torchao(module):
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
    from torchao.quantization.qat import QATConfig

    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    module = copy.deepcopy(module)
    quantize_(module, QATConfig(config, step="convert"))
    return module


@pytest.mark.parametrize(
    ("prepared", "converted", "width"),
    [
        (prepared_graph, converted_graph, 4),
        (prepared_eager, converted_eager, 4),
        (prepared_by_torchao, converted_by_torchao, 32),
    ],
    ids=["fx", "eager", "torchao"],
)
def test_quantization_aware_training(prepared, converted, width):
    x = random(3, width)
    module = trains(prepared, mean_square, x)[0][0]
    plain = made(prepared)
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        equal(converted(module)(x[0][0]), converted(plain)(x[0][0]), "converted")


# ----------------------------------------------------------------------------------------------------- Opacus


def private():
    from opacus import GradSampleModule

    return GradSampleModule(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double())


def private_loss(module, x):
    module.zero_grad()  # with the gradients of samples
    return mean_square(module, x)


def test_gradients_of_samples():
    """Opacus' own gradients are the rank's; ``grad`` is the mean."""
    need("opacus")
    modules, copies = trains(private, private_loss, random(4, 6, dtype=torch.float64))
    for module, wanted in zip(modules, copies, strict=True):
        for got, parameter in zip(module.parameters(), wanted.parameters(), strict=True):
            equal(got.grad_sample, parameter.grad_sample, "gradients of samples")


def with_privacy(rank):
    """Clipped for each sample over all ranks, as in one process with all samples."""
    quiet()
    from opacus.optimizers import DistributedDPOptimizer, DPOptimizer

    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.1}
    model, plain = lockstep.replicate(made(private)), made(private)
    ours = DistributedDPOptimizer(torch.optim.SGD(model.parameters(), 0.5), expected_batch_size=4, **options)
    theirs = DPOptimizer(torch.optim.SGD(plain.parameters(), 0.5), expected_batch_size=8, **options)
    for step in random(4, 6, dtype=torch.float64, steps=3):
        for module, optimizer, batch in ((model, ours, step[rank.rank]), (plain, theirs, torch.cat(step))):
            optimizer.zero_grad()
            mean_square(module, batch).backward()
            optimizer.step()
    for (name, got), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        equal(got, wanted, name, 1e-12)
    lockstep.check_in_sync(model)


def test_differential_privacy():
    need("opacus")
    run_processes(2, with_privacy)


# ----------------------------------------------------------------------------------------- Gaussian processes


def variational():
    import gpytorch

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            distribution = gpytorch.variational.CholeskyVariationalDistribution(5)
            points = torch.linspace(0, 1, 5).unsqueeze(1)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    model.likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model(torch.zeros(1, 1).double())  # its first call makes its parameters, at random
    return model


def variational_of_botorch():
    from botorch.models import SingleTaskVariationalGP

    model = SingleTaskVariationalGP(torch.linspace(0, 1, 5).double().unsqueeze(1), num_outputs=1, inducing_points=5)
    model(torch.zeros(1, 1).double())
    return model


def evidence(model, x):
    import gpytorch

    inner = getattr(model, "model", model)
    objective = gpytorch.mlls.VariationalELBO(model.likelihood, inner, num_data=16)
    return -objective(model(x), x.sin().squeeze(-1))


@pytest.mark.parametrize("factory", [variational, variational_of_botorch], ids=["gpytorch", "botorch"])
def test_a_gaussian_process(factory):
    need("botorch")
    trains(factory, evidence, random(4, 1, dtype=torch.float64), tolerance=1e-12)  # LAPACK's bits vary


# ------------------------------------------------------------------------------------- replicas in one process


@pytest.mark.parametrize(("factory", "width"), [(traced, 4), (private, 6), (prepared_by_torchao, 32)])
def test_replicas_of_one_process(factory, width):
    """The gradients of a batch over two replicas are those of the module itself, also after its graph is edited."""
    need("opacus")
    dtype, tolerance = (torch.float32, 1e-5) if factory is prepared_by_torchao else (torch.float64, 1e-12)
    module, plain = made(factory).to(dtype), made(factory).to(dtype)
    parallel = lockstep.DataParallel(module, ["cpu", "cpu"])
    for (x,) in random(6, width, steps=2, world=1, dtype=dtype):
        _same_gradients(parallel, module, plain, x, tolerance)
    if factory is traced:
        edit(module)
        edit(plain)
        _same_gradients(parallel, module, plain, x, tolerance)


def _same_gradients(parallel, module, plain, x, tolerance):
    for one in (module, plain):
        one.zero_grad()
    mean_square(parallel, x).backward()
    mean_square(plain, x).backward()
    for (name, got), (_, wanted) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        equal(got.grad, wanted.grad, name, tolerance)


def test_replicas_of_a_sentence_transformer():
    need("sentence_transformers")
    module, plain = made(sentences), made(sentences)
    parallel = lockstep.DataParallel(module, ["cpu", "cpu"])
    for model in (parallel, plain):
        output = model(plain.preprocess(pairs()[0][0]))
        output["sentence_embedding"].square().mean().backward()
    for (name, got), (_, wanted) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        equal(got.grad, wanted.grad, name, 1e-5)


def test_replicas_of_a_gaussian_process():
    """Their outputs are distributions, which nothing gathers: the loss is computed in the replicas."""
    need("botorch")
    import gpytorch

    module, plain = made(variational), made(variational)
    parallel = lockstep.DataParallel(module, ["cpu", "cpu"])

    def loss_of(likelihood, model):
        objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=16)
        return lambda output, y: -objective(output, y)

    x = random(6, 1, dtype=torch.float64)[0][0]
    y = x.sin().squeeze(-1)
    loss = parallel.step(loss_of(module.likelihood, module), x, y)
    wanted = loss_of(plain.likelihood, plain)(plain(x), y)
    wanted.backward()
    equal(loss, wanted.detach(), "loss", 1e-12)
    for (name, got), (_, expected) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        equal(got.grad, expected.grad, name, 1e-12)


# ------------------------------------------------------------------------------------- the end of a program


ENDS = """
import torch, torch.distributed as dist, lockstep
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
modules = [lockstep.replicate(torch.nn.Linear(2, 2)), lockstep.DistributedDataParallel(torch.nn.Linear(2, 2))]
optimizers = [torch.optim.SGD(modules[0].parameters(), 0.1)]
optimizers.append(lockstep.shard_optimizer(torch.optim.Adam(modules[1].parameters())))
modules.append(lockstep.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"]))
for module in modules:
    module(torch.ones(2, 2)).sum().backward()
for optimizer in optimizers:
    optimizer.step()
"""


def test_a_program_ends_without_a_word():
    """Its modules are alive to the end, when names of Python's modules are gone: with dill, which torch imports."""
    need("dill")
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Field(nn.Module):
    """As torchdiffeq asks for the parameters of a replica."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for module in (self, self.layer):
            if getattr(module, "_is_replica", False):
                found = [value for value in vars(module).values() if torch.is_tensor(value)]
            else:
                found = list(module.parameters())
            assert len(found) == 2
        return self.layer(x)


def test_replicas_that_are_asked_for_parameters():
    parallel = lockstep.DataParallel(Field(), ["cpu", "cpu"])
    parallel(torch.ones(4, 4)).sum().backward()
