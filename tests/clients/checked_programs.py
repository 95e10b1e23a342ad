"""Programs that other people's packages train, as cases of a check. All of them are right on any number of ranks."""

from __future__ import annotations

import contextlib
import importlib
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import client_programs
from lockstep.check import Case

client_programs.quiet()
for _name in ("transformers", "timm", "lightning", "diffusers", "sentence_transformers", "torchvision", "accelerate"):
    with contextlib.suppress(ImportError):  # once, in the process off which the others are forked
        importlib.import_module(_name)

AdamW = torch.optim.AdamW
TINY = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def made(name, config, **options):
    """A model of transformers, with the dropout that it has by default."""
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**options)).train()


def texts(steps=2):
    return [torch.randint(32, (6, 8)) for _ in range(steps)]


def language_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def small_gpt2():
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return made("GPT2LMHeadModel", "GPT2Config", **sizes, bos_token_id=0, eos_token_id=0)


def gpt2():
    return Case(small_gpt2(), texts(), language_loss, AdamW)


def gpt2_checkpointed():
    model = small_gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Case(model, texts(), language_loss, AdamW)


def gpt2_with_adapters():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        small_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    )
    return Case(model, texts(), language_loss, AdamW)


def llama():
    model = made("LlamaForCausalLM", "LlamaConfig", **TINY, intermediate_size=16, max_position_embeddings=16)
    return Case(model, texts(), language_loss, AdamW)


def mixtral():
    """A mixture of experts: each rank's rows choose their own."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    options = {**TINY, **experts, "intermediate_size": 16, "max_position_embeddings": 16}
    options["experts_implementation"] = "eager"  # the other one knows no float64
    return Case(made("MixtralForCausalLM", "MixtralConfig", **options), texts(), language_loss, AdamW)


def t5():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = made("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0)
    return Case(model, texts(), language_loss, AdamW)


def bert():
    sizes = {**TINY, "intermediate_size": 16, "max_position_embeddings": 16}
    model = made("BertForSequenceClassification", "BertConfig", **sizes)
    batches = [(ids, torch.randint(2, (6,))) for ids in texts()]
    return Case(model, batches, lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss, AdamW)


# ----------------------------------------------------------------------------------------------------- images


def images(size=32, steps=2):
    return [(torch.randn(6, 3, size, size), torch.randint(4, (6,))) for _ in range(steps)]


def image_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def timm_vit():
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 4}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, drop_path_rate=0.2, proj_drop_rate=0.1)
    return Case(model, images(), image_loss, AdamW)


def timm_convnext():
    import timm

    model = timm.models.convnext.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=4, drop_path_rate=0.2)
    return Case(model, images(), image_loss, AdamW)


def torchvision_swin():
    import torchvision

    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": [2, 2]}
    return Case(torchvision.models.SwinTransformer(**sizes, num_classes=4), images(), image_loss, AdamW)


def noise_loss(model, batch):
    images, noise, times = batch
    scale = times.view(-1, 1, 1, 1) / 1000
    return mse_loss(model((1 - scale) * images + scale * noise, times).sample, noise)


def diffusion():
    from diffusers import UNet2DModel

    channels = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, down_block_types=down, up_block_types=up, **channels
    )
    batches = [(torch.randn(6, 1, 8, 8), torch.randn(6, 1, 8, 8), torch.randint(1000, (6,))) for _ in range(2)]
    return Case(model, batches, noise_loss, AdamW)


# ------------------------------------------------------------------------------------------------------ others


def sentences():
    """Samples are pairs of texts with a score."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses, modules
    from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

    words = WhitespaceTokenizer(vocab=["a", "b", "c", "d"])
    embeddings = modules.WordEmbeddings(words, torch.randn(4, 8).numpy(), update_embeddings=True)
    model = SentenceTransformer(modules=[embeddings, modules.Pooling(8)], device="cpu")

    def loss(model, batch):
        inner = getattr(model, "module", model)
        features = [dict(inner.preprocess(list(column))) for column in batch[:2]]
        return losses.CosineSimilarityLoss(model)(features, batch[2])

    def collate(samples):
        first, second, scores = zip(*samples, strict=True)
        return first, second, torch.tensor(scores, dtype=torch.float64)

    samples = [("a b", "c", 0.5), ("b", "d a", 0.1), ("c c", "a", 0.9), ("d", "d b", 0.3)]
    return Case(model, [samples], loss, steps=3, collate=collate)


def graphs():
    """Samples are graphs with different numbers of nodes."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = GCNConv(3, 8), nn.Linear(8, 2)

        def forward(self, batch):
            return self.last(global_mean_pool(self.first(batch.x, batch.edge_index).relu(), batch.batch))

    def graph(nodes):
        edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        return Data(x=torch.randn(nodes, 3, dtype=torch.float64), edge_index=edges, y=torch.randint(2, (1,)))

    batches = [[graph(2 + n) for n in range(6)] for _ in range(2)]
    return Case(Net(), batches, lambda model, batch: cross_entropy(model(batch), batch.y), collate=Batch.from_data_list)


def equivariant():
    from e3nn import o3

    layer = o3.FullyConnectedTensorProduct("2x0e + 1x1o", "1x0e + 1x1o", "2x0e + 1x1o")
    batches = [(torch.randn(6, 5), torch.randn(6, 4)) for _ in range(2)]
    return Case(layer, batches, lambda model, batch: model(*batch).square().mean())


def private():
    from opacus import GradSampleModule

    model = GradSampleModule(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    return Case(model, [torch.randn(6, 6)] * 2, lambda model, x: model(x).square().mean())


def gaussian_process():
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
    model(torch.zeros(1, 1).double())  # its first call makes its parameters

    def loss(model, x):
        inner = getattr(model, "module", model)
        return -gpytorch.mlls.VariationalELBO(inner.likelihood, inner, num_data=16)(model(x), x.sin().squeeze(-1))

    return Case(model, [torch.rand(6, 1) for _ in range(2)], loss)


def lightning_module():
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

        def forward(self, batch):
            return cross_entropy(self.network(batch[0]), batch[1])

    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(2)]
    return Case(Lit(), batches, lambda model, batch: model(batch), AdamW)


def tensors_with_names():
    from tensordict import TensorDict

    batch = TensorDict({"x": torch.randn(6, 4, dtype=torch.float64), "y": torch.randint(2, (6,))}, batch_size=6)
    return Case(nn.Linear(4, 2), [batch], lambda model, rows: cross_entropy(model(rows["x"]), rows["y"]), steps=2)


# -------------------------------------------------------------------------------------------------- optimizers


def network_with(optimizer):
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    batches = [(torch.randn(6, 6), torch.randint(4, (6,))) for _ in range(3)]
    return Case(model, batches, image_loss, optimizer)


def schedule_free():
    from schedulefree import AdamWScheduleFree

    def make(parameters):
        optimizer = AdamWScheduleFree(parameters, lr=0.01)
        optimizer.train()
        return optimizer

    return network_with(make)


def lion():
    from lion_pytorch import Lion

    return network_with(partial(Lion, lr=0.01))


def adamp():
    from adamp import AdamP

    return network_with(partial(AdamP, lr=0.01))


def lamb():
    from pytorch_optimizer import Lamb

    return network_with(partial(Lamb, lr=0.01))


def riemannian():
    import geoopt

    return network_with(partial(geoopt.optim.RiemannianAdam, lr=0.01))
