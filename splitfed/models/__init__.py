"""Small models by name, and `build`, which makes any model from a seed; each is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.models.alexnet import alexnet as alexnet
    from splitfed.models.build import build as build
    from splitfed.models.ecg_cnn import ecg_cnn as ecg_cnn
    from splitfed.models.fedavg_cnn import fedavg_cnn as fedavg_cnn
    from splitfed.models.lenet import lenet as lenet
    from splitfed.models.mlp import mlp as mlp
    from splitfed.models.resnet8 import resnet8 as resnet8
    from splitfed.models.resnet18 import resnet18 as resnet18
    from splitfed.models.resnet34 import resnet34 as resnet34
    from splitfed.models.transformers import transformers as transformers
    from splitfed.models.vgg11 import vgg11 as vgg11

make_lazy(__name__)
