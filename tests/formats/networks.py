"""Tiny networks of four kinds with weights that nobody trained, as a user's file would define them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gati.zoo import ResNet

CLASSES = 5


def resnet() -> nn.Module:
    """Three residual blocks with batch normalisation and zero-padded shortcuts."""
    return _unsettled(ResNet((1, 1, 1), num_classes=CLASSES))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 2 * inputs
        self.expand = nn.Sequential(nn.Conv2d(inputs, wide, 1), nn.BatchNorm2d(wide), nn.Hardswish())
        depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(wide), nn.ReLU6(inplace=True))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide, 1), nn.Hardsigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, outputs, 1), nn.BatchNorm2d(outputs))
        self.same = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depthwise(self.expand(x))
        hidden = self.project(hidden * self.squeeze(hidden))
        return x + hidden if self.same else hidden


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        sizes = ((8, 8, 1), (8, 12, 2), (12, 12, 1))
        self.blocks = nn.Sequential(*(InvertedResidual(*three) for three in sizes))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return result


def mobilenet() -> nn.Module:
    """Depthwise convolutions, squeeze and excitation, in-place activations."""
    return _unsettled(MobileNet())


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 8), (8, 12), (12, 16))
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, 3, padding=1),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(inplace=True),
                    nn.MaxPool2d(2),
                )
                for inputs, outputs in sizes
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(3)  # of a 4 x 4 map: the cells overlap
        hidden = (nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Dropout())
        self.head = nn.Sequential(*hidden, nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.pool(self.blocks(x))).softmax(1)
        return result


def vgg() -> nn.Module:
    """Convolution and pooling stages, dropout, an uneven adaptive pooling; gives probabilities."""
    return _unsettled(VGG())


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], dim=1) + self.positions
        result: Tensor = self.head(self.norm(self.encoder(tokens))[:, 0])
        return result


def vit() -> nn.Module:
    """Attention over a class token and sixteen patches."""
    return _unsettled(ViT())


def _unsettled(module: nn.Module) -> nn.Module:
    """Give batch normalisation something to do, and the answers some contrast."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for child in module.modules():
            if isinstance(child, nn.BatchNorm2d):
                child.running_mean.normal_(0, 0.3, generator=generator)
                child.running_var.uniform_(0.5, 1.5, generator=generator)
                child.weight.uniform_(0.7, 1.3, generator=generator)
    return module
