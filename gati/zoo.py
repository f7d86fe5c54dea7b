"""Networks that Gati always has at hand.

`resnet20`, `resnet32`, `resnet44`, `resnet56` and `resnet110` are the CIFAR networks of He et al. 2016,
"Deep Residual Learning for Image Recognition", section 4.2: three stages of n blocks with 16, 32 and 64
channels and option A shortcuts (stride-2 subsampling, zero-padded channels, no parameters). Parameter
names match the public checkpoints of akamaster/pytorch_resnet_cifar10.

`digits_resnet` is the same network for the 8x8 grey digits of scikit-learn,
and trains in a minute on two cores.

`spectrogram_vgg` is a small network after Simonyan and Zisserman 2015 (stages of 3x3 convolutions that end
with a maximum) for a second of sound at 8 kHz, such as a spoken digit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as functional
from torch import Tensor, nn

from gati.model.preprocess import Preprocessing
from gati.model.sound import LogMel

_CIFAR = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), channels=3)
_DIGITS = Preprocessing(mean=(0.305,), std=(0.376,), channels=1)
_SOUND = Preprocessing(mean=(0.3,), std=(0.3,), channels=1, sound=LogMel(sample_rate=8000, seconds=1.0))
_VGG_CHANNELS = (32, 64, 128, 256)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with an option A shortcut.

    [B, inputs, H, W] -> [B, outputs, H / stride, W / stride]
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.padded_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual + shortcut)."""
        residual = functional.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return functional.relu(residual + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.padded_channels:
            before = self.padded_channels // 2
            x = functional.pad(x, (0, 0, 0, 0, before, self.padded_channels - before))
        return x


class ResNet(nn.Module):
    """The CIFAR residual network: [B, inputs, H, W] -> logits [B, num_classes].

    `blocks_per_stage` is the paper's n, once per stage; depth is 6n + 2.
    """

    def __init__(self, blocks_per_stage: Sequence[int], num_classes: int = 10, inputs: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks_per_stage[0], stride=1)
        self.layer2 = _stage(16, 32, blocks_per_stage[1], stride=2)
        self.layer3 = _stage(32, 64, blocks_per_stage[2], stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = functional.relu(self.bn1(self.conv1(x)))  # [B, 16, H, W]
        x = self.layer3(self.layer2(self.layer1(x)))  # [B, 64, H/4, W/4]
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)  # [B, 64]
        logits: Tensor = self.linear(x)
        return logits


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs) for _ in range(blocks - 1)))


def resnet20(num_classes: int = 10) -> ResNet:
    """20 layers, 0.27 M parameters, 9 blocks."""
    return ResNet((3, 3, 3), num_classes)


def resnet32(num_classes: int = 10) -> ResNet:
    """32 layers, 0.46 M parameters, 15 blocks."""
    return ResNet((5, 5, 5), num_classes)


def resnet44(num_classes: int = 10) -> ResNet:
    """44 layers, 0.66 M parameters, 21 blocks."""
    return ResNet((7, 7, 7), num_classes)


def resnet56(num_classes: int = 10) -> ResNet:
    """56 layers, 0.85 M parameters, 27 blocks."""
    return ResNet((9, 9, 9), num_classes)


def resnet110(num_classes: int = 10) -> ResNet:
    """110 layers, 1.7 M parameters, 54 blocks."""
    return ResNet((18, 18, 18), num_classes)


def digits_resnet(num_classes: int = 10) -> ResNet:
    """20 layers for one-channel 8x8 images: stages of 3 blocks at 8x8, 4x4 and 2x2 pixels."""
    return ResNet((3, 3, 3), num_classes, inputs=1)


def spectrogram_vgg(num_classes: int = 10) -> nn.Sequential:
    """9 layers, 1.2 M parameters, 4 blocks: spectrograms [B, 1, mels, frames] to logits [B, num_classes]."""
    stages: list[nn.Module] = []
    before = 1
    for channels in _VGG_CHANNELS:
        layers: list[nn.Module] = []
        for inputs in (before, channels):
            convolution = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        before = channels
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Sequential(*stages), *pooled, nn.Linear(before, num_classes))


PRESETS: dict[Callable[..., nn.Module], Preprocessing] = {
    resnet20: _CIFAR,
    resnet32: _CIFAR,
    resnet44: _CIFAR,
    resnet56: _CIFAR,
    resnet110: _CIFAR,
    digits_resnet: _DIGITS,
    spectrogram_vgg: _SOUND,
}
