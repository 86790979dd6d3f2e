"""Swin transformer (Liu et al., arXiv:2103.14030) with the names of torchvision, so that its
weights load.

Maps of features have the shape (samples, channels, height, width) between the modules of
`features`, and (samples, height, width, channels) within them; changes are views.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paceline.base.errors import UsageError

_WINDOW = 7  # side of the windows within which positions attend to each other
_PATCH = 4  # pixels of the side of a patch, which is a position of the first map
_HEAD = 32  # channels of a head of attention, unless there are fewer
_STAGES = 4
_OTHERS = -100.0  # score of a position that a shift has put beside the window's own ones


def swin_layers(width: int, third_blocks: int, stochastic_depth: float) -> dict[str, nn.Module]:
    """Return the layers by name: `features`, from images to maps of 1/32 of their side with
    8 * width channels, and `norm`.

    width: channels of the first stage. third_blocks: blocks of the third stage; the others have
    two. (96, 6) is Swin-T, (96, 18) Swin-S and (128, 18) Swin-B. stochastic_depth: probability
    with which the last block is left out for a sample; that of earlier ones grows from 0.
    """
    heads = max(1, width // _HEAD)
    if width % heads:
        raise UsageError(f"width: a Swin transformer needs a multiple of {_HEAD}, got {width}")
    depths = (2, 2, third_blocks, 2)
    last = sum(depths) - 1
    rates = iter([stochastic_depth * number / last for number in range(last + 1)])
    features: list[nn.Module] = [_Patches(width)]
    for stage, blocks in enumerate(depths):
        channels = width * 2**stage
        features.append(
            _Stage(
                *(
                    _Block(channels, heads * 2**stage, _WINDOW // 2 * (number % 2), rate)
                    for number, rate in enumerate(itertools.islice(rates, blocks))
                )
            )
        )
        if stage < _STAGES - 1:
            features.append(_Merging(channels))
    layers = {"features": nn.Sequential(*features), "norm": _Norm(8 * width)}
    for layer in layers["features"].modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return layers


def map_sides(side: int) -> tuple[int, int]:
    """Return the sides of the maps after the first and the last stage, for images of this side."""
    first = side // _PATCH
    return first, -(-first // 2 ** (_STAGES - 1))


def _channels_last(units: Tensor) -> Tensor:
    return units.permute(0, 2, 3, 1)


def _channels_first(units: Tensor) -> Tensor:
    return units.permute(0, 3, 1, 2)


class _Patches(nn.Sequential):
    """The features of each patch of the images."""

    def __init__(self, width: int) -> None:
        convolution = nn.Conv2d(3, width, _PATCH, _PATCH)
        super().__init__(convolution, nn.Identity(), nn.LayerNorm(width))

    def forward(self, images: Tensor) -> Tensor:
        return _channels_first(self[2](_channels_last(self[0](images))))


class _Stage(nn.Sequential):
    """Blocks for maps of one size."""

    def forward(self, units: Tensor) -> Tensor:
        units = _channels_last(units)
        for block in self:
            units = block(units)
        return _channels_first(units)


class _Norm(nn.LayerNorm):
    """Normalisation over the channels of each position."""

    def forward(self, units: Tensor) -> Tensor:
        return _channels_first(super().forward(_channels_last(units)))


class _Merging(nn.Module):
    """Four neighbours become one position with twice as many channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)
        self.norm = nn.LayerNorm(4 * channels)

    def forward(self, units: Tensor) -> Tensor:
        height, width = units.shape[2:]
        even = _channels_last(pad(units, (0, width % 2, 0, height % 2)))
        parts = [even[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return _channels_first(self.reduction(self.norm(torch.cat(parts, -1))))


class _Block(nn.Module):
    """Attention within windows and a feed-forward network, each with a shortcut."""

    def __init__(self, channels: int, heads: int, shift: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attn = _Attention(channels, heads, shift)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Identity(),
            nn.Linear(4 * channels, channels),
        )
        self.attend_depth, self.mlp_depth = _StochasticDepth(rate), _StochasticDepth(rate)

    def forward(self, units: Tensor) -> Tensor:
        units = units + self.attend_depth(self.attn(self.norm1(units)))
        joined: Tensor = units + self.mlp_depth(self.mlp(self.norm2(units)))
        return joined


class _StochasticDepth(nn.Module):
    """Leave a branch out for some samples (Huang et al., arXiv:1603.09382): dropout of a factor
    that each sample has, so that it belongs to samples as any dropout does."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate) if rate else None

    def forward(self, units: Tensor) -> Tensor:
        if self.drop is None or not self.training:
            return units
        factors: Tensor = self.drop(units.new_ones(len(units), *(1 for _ in units.shape[1:])))
        return units * factors


class _Attention(nn.Module):
    """Attention of the positions of a window to each other.

    shift: rows and columns by which the windows of this block are displaced, so that neighbouring
    windows of the block before exchange values.
    """

    relative_position_index: Tensor

    def __init__(self, channels: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * _WINDOW - 1) ** 2, heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        places = torch.cartesian_prod(torch.arange(_WINDOW), torch.arange(_WINDOW))
        between = places[:, None] - places[None, :] + _WINDOW - 1
        index = between[..., 0] * (2 * _WINDOW - 1) + between[..., 1]
        self.register_buffer("relative_position_index", index.flatten())

    def forward(self, units: Tensor) -> Tensor:
        """Return units of the same shape, (samples, height, width, channels)."""
        rows, columns = units.shape[1:3]
        padded = pad(units, (0, 0, 0, -columns % _WINDOW, 0, -rows % _WINDOW))
        height, width = padded.shape[1:3]
        shifts = [self.shift if side > _WINDOW else 0 for side in (height, width)]
        padded = padded.roll([-shift for shift in shifts], (1, 2))
        query, key, value = (
            torch.unflatten(_windows(part), -1, (self.heads, -1)).transpose(2, 3)
            for part in self.qkv(padded).chunk(3, -1)
        )
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1) + self._bias()
        if any(shifts):
            scores = scores + _scores_of_others(height, width, shifts, units.device)
        attended = (scores.softmax(-1) @ value).transpose(2, 3).flatten(3)
        found: Tensor = self.proj(_joined(attended, height, width)).roll(shifts, (1, 2))
        return found[:, :rows, :columns]

    def _bias(self) -> Tensor:
        """Return the scores of relative positions, shape (heads, positions, positions)."""
        found = self.relative_position_bias_table[self.relative_position_index]
        return torch.unflatten(found, 0, (_WINDOW**2, -1)).permute(2, 0, 1)


def _windows(units: Tensor) -> Tensor:
    """Return the windows of a map: shape (samples, windows, positions, channels)."""
    rows = torch.unflatten(torch.unflatten(units, 2, (-1, _WINDOW)), 1, (-1, _WINDOW))
    return rows.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _joined(windows: Tensor, height: int, width: int) -> Tensor:
    """Return the map of these windows: shape (samples, height, width, channels)."""
    tiles = torch.unflatten(windows, 2, (_WINDOW, _WINDOW))
    tiles = torch.unflatten(tiles, 1, (height // _WINDOW, width // _WINDOW))
    return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _scores_of_others(height: int, width: int, shifts: list[int], device: torch.device) -> Tensor:
    """Return the scores that keep positions apart which only the shift has put into one window:
    shape (windows, 1, positions, positions)."""
    rows, columns = (
        _parts(side, shift, device) for side, shift in zip((height, width), shifts, strict=True)
    )
    parts = _windows((3 * rows[:, None] + columns)[None, :, :, None])[0, :, :, 0]
    differ = parts[:, :, None] != parts[:, None, :]
    return differ[:, None] * _OTHERS


def _parts(side: int, shift: int, device: torch.device) -> Tensor:
    """Number the parts of a side that were not neighbours before the shift."""
    places = torch.arange(side, device=device)
    if not shift:
        return torch.zeros_like(places)
    return (places >= side - _WINDOW).long() + (places >= side - shift).long()
