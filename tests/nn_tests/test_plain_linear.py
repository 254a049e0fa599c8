"""What stays a linear where the class has none is one again after loading."""

import pytest
import torch
from float64 import relative_error
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import PretrainedConfig, PreTrainedModel

import mmqc
from mmqc.nn.plain_linear import PlainLinear


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Config(PretrainedConfig):
    model_type = "plain-linear-test"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.body = weight_norm(nn.Linear(16, 16)) if config.how == "weight_norm" else nn.Linear(16, 16)
        self.head = Product() if config.how == "product" else nn.Linear(16, 20)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        del module

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(self.norm(x + self.body(x)))


@pytest.mark.parametrize(("how", "place"), [("product", "head"), ("weight_norm", "body")])
def test_plain_linear__is_loaded_where_one_was_saved(how: str, place: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = Model(Config(how=how))
    for p in model.norm.parameters():
        nn.init.normal_(p)
    ids = torch.randint(0, 20, (2, 6))
    with torch.no_grad():
        expected = model(ids)
        mmqc.quantize_(model, mmqc.recipes.rotate(), [{"input_ids": ids}], progress=False)
        assert relative_error(model(ids), expected) < 1e-5
        model.save_pretrained(tmp_path)
        loaded = Model.from_pretrained(tmp_path)
        assert isinstance(loaded.get_submodule(place), PlainLinear)
        assert torch.equal(loaded(ids), model(ids))
