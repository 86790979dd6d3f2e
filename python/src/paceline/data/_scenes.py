"""Paints one outdoor scene: landscape, things that look like fire or smoke, fire, smoke.

Landscape, light and look-alikes (sunsets, autumn leaves, red roofs and cars; clouds and fog) are
drawn the same way whatever the class, so that colour statistics say little: the class is in
shapes and textures — flame tongues with a white-hot core, plumes that widen as they rise.
Colours are RGB floats in 0..255 until the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from paceline.data._noise import blend, octaves, ramp, smoothstep

if TYPE_CHECKING:
    from numpy.typing import NDArray

Canvas = Any  # NDArray[np.float32], shape (height, width, 3); OpenCV's stubs know only Mat
Colour = tuple[int, int, int]

CLASSES = ("fire", "no_fire", "smoke")

_SKIES: list[tuple[Colour, Colour]] = [  # zenith, horizon
    ((70, 120, 200), (175, 205, 235)),
    ((105, 150, 210), (220, 228, 235)),
    ((150, 155, 165), (205, 205, 205)),
    ((95, 100, 112), (150, 150, 155)),
    ((90, 80, 130), (250, 160, 80)),
    ((120, 70, 90), (245, 120, 50)),
    ((25, 30, 55), (70, 65, 80)),
]
_GROUNDS: list[Colour] = [
    (85, 120, 55), (120, 130, 70), (150, 125, 85), (95, 75, 55), (110, 110, 112), (165, 110, 60),
    (60, 80, 45), (190, 185, 180),
]  # fmt: skip
_GREENS: list[Colour] = [(40, 75, 35), (60, 95, 40), (75, 105, 60), (30, 55, 40)]
_AUTUMN: list[Colour] = [(205, 95, 20), (225, 145, 30), (185, 55, 25), (235, 180, 50)]
_PAINTS: list[Colour] = [(190, 30, 25), (210, 90, 20), (60, 70, 130), (225, 225, 220), (50, 55, 55)]

_FLAME = [
    (0.0, (70, 12, 4)), (0.25, (175, 40, 8)), (0.5, (240, 110, 18)), (0.75, (255, 195, 60)),
    (1.0, (255, 250, 205)),
]  # fmt: skip


def paint(rng: np.random.Generator, kind: str, width: int, height: int) -> NDArray[np.uint8]:
    """A picture of class `kind` (one of CLASSES), uint8 RGB of shape (height, width, 3)."""
    canvas, horizon = _landscape(rng, width, height)
    if rng.random() < 0.55:
        _clouds(rng, canvas, horizon)
    _things(rng, canvas, horizon)
    if kind == "smoke" or (kind == "fire" and rng.random() < 0.25):
        strength = 1.0 if kind == "smoke" else 0.5
        for _ in range(1 if kind == "fire" else int(rng.integers(1, 3))):
            _plume(rng, canvas, horizon, strength)
    if kind == "fire":
        for _ in range(int(rng.integers(1, 4))):
            _flames(rng, canvas, horizon)
    elif rng.random() < 0.35:
        _warm_light(rng, canvas, horizon)
    if rng.random() < 0.3:
        _fog(rng, canvas, horizon)
    return _expose(rng, canvas)


def _pick(rng: np.random.Generator, colours: list[Colour], jitter: float = 14.0) -> Canvas:
    base = np.array(colours[int(rng.integers(len(colours)))], dtype=np.float32)
    return np.clip(base + rng.normal(0, jitter, 3).astype(np.float32), 0, 255)


def _landscape(rng: np.random.Generator, width: int, height: int) -> tuple[Canvas, int]:
    horizon = int(height * rng.uniform(0.25, 0.65))
    zenith, low = _SKIES[int(rng.integers(len(_SKIES)))]
    down = np.linspace(0, 1, horizon, dtype=np.float32)[:, None, None] ** 1.3
    sky = np.array(zenith, np.float32) * (1 - down) + np.array(low, np.float32) * down
    canvas: Canvas = np.empty((height, width, 3), dtype=np.float32)
    canvas[:horizon] = sky
    rows = height - horizon
    near = np.linspace(0.75, 1.1, rows, dtype=np.float32)[:, None]
    texture = octaves(rng, rows, width, cells=4, levels=8, stretch=2.5)
    light = near * (1 + np.float32(0.22) * texture)
    first, second = _pick(rng, _GROUNDS), _pick(rng, _GROUNDS)
    mix = smoothstep(-1.0, 1.0, octaves(rng, rows, width, cells=2, levels=4, stretch=2.0))
    canvas[horizon:] = (first + mix[..., None] * (second - first)) * light[..., None]
    return canvas, horizon


def _clouds(rng: np.random.Generator, canvas: Canvas, horizon: int) -> None:
    """Flat-bottomed, wider than high, in the sky only."""
    sky = canvas[:horizon]
    field = octaves(rng, horizon, canvas.shape[1], cells=2, levels=6, stretch=2.2)
    cover = rng.uniform(-0.4, 0.9)
    alpha = smoothstep(cover, cover + 1.2, field) * np.float32(rng.uniform(0.4, 0.95))
    alpha *= np.linspace(1.0, 0.3, horizon, dtype=np.float32)[:, None]
    shade = rng.uniform(120, 250)
    blend(sky, np.float32(shade) + rng.normal(0, 5, 3).astype(np.float32), alpha)


def _things(rng: np.random.Generator, canvas: Canvas, horizon: int) -> None:
    height, width = canvas.shape[:2]
    autumn = rng.random() < 0.4
    for _ in range(int(rng.integers(2, 9))):
        base = horizon + int(rng.uniform(-0.02, 0.25) * height)
        size = rng.uniform(0.08, 0.32) * height
        _tree(rng, canvas, (int(rng.uniform(0, width)), base), size, autumn=autumn)
    for _ in range(int(rng.integers(0, 3))):
        _house(rng, canvas, horizon)
    for _ in range(int(rng.integers(0, 3))):
        _car(rng, canvas, horizon)


def _tree(
    rng: np.random.Generator, canvas: Canvas, foot: tuple[int, int], size: float, *, autumn: bool
) -> None:
    """A trunk under a crown of many small leaves clusters; in autumn as warm as a fire."""
    x, y = foot
    trunk = (45.0, 35.0, 28.0)
    thick = max(1, int(size * 0.05))
    cv2.rectangle(canvas, (x - thick, int(y - size * 0.5)), (x + thick, y), trunk, -1)
    palette = _AUTUMN if autumn and rng.random() < 0.8 else _GREENS
    base = _pick(rng, palette, 10)
    clusters = int(rng.integers(25, 70))
    spots = rng.normal(0, 0.3, (clusters, 2)) * size * np.array([0.8, 0.9])
    lights = rng.uniform(0.55, 1.3, clusters)
    radii = np.maximum(1, rng.uniform(0.03, 0.11, clusters) * size).astype(int)
    for (dx, dy), light, radius in zip(spots, lights, radii, strict=True):
        colour = tuple(float(c) for c in np.clip(base * light, 0, 255))
        centre = (int(x + dx), int(y - size * 0.75 + dy))
        cv2.ellipse(canvas, centre, (int(radius), max(1, int(radius * 0.7))), 0, 0, 360, colour, -1)


def _house(rng: np.random.Generator, canvas: Canvas, horizon: int) -> None:
    height, width = canvas.shape[:2]
    wide, high = int(rng.uniform(0.08, 0.25) * width), int(rng.uniform(0.06, 0.2) * height)
    x, y = int(rng.uniform(0, width - wide)), horizon + int(rng.uniform(0, 0.12) * height)
    wall = tuple(float(c) for c in _pick(rng, [(200, 195, 180), (170, 150, 130), (140, 140, 145)]))
    roof = tuple(float(c) for c in _pick(rng, [(175, 70, 45), (150, 45, 35), (90, 85, 85)]))
    cv2.rectangle(canvas, (x, y - high), (x + wide, y), wall, -1)
    peak = np.array(
        [[x - wide // 12, y - high], [x + wide // 2, y - high * 17 // 10],
         [x + wide + wide // 12, y - high]],
        dtype=np.int32,
    )  # fmt: skip
    cv2.fillPoly(canvas, [peak], roof, cv2.LINE_AA)
    glow = (250.0, 190.0, 90.0) if rng.random() < 0.4 else (60.0, 70.0, 80.0)
    for column in range(int(rng.integers(1, 4))):
        left = x + wide // 8 + column * wide // 4
        top = y - high * 3 // 4
        cv2.rectangle(canvas, (left, top), (left + wide // 9, top + high // 3), glow, -1)


def _car(rng: np.random.Generator, canvas: Canvas, horizon: int) -> None:
    height, width = canvas.shape[:2]
    long = int(rng.uniform(0.06, 0.2) * width)
    tall = max(3, long // 4)
    x = int(rng.uniform(0, width - long))
    y = int(rng.uniform(horizon + 0.1 * height, height - tall))
    paint_colour = tuple(float(c) for c in _pick(rng, _PAINTS))
    cv2.rectangle(canvas, (x, y - tall), (x + long, y), paint_colour, -1)
    cabin = np.array(
        [[x + long // 6, y - tall], [x + long // 3, y - 2 * tall],
         [x + long * 3 // 4, y - 2 * tall], [x + long * 9 // 10, y - tall]],
        dtype=np.int32,
    )  # fmt: skip
    cv2.fillPoly(canvas, [cabin], (70.0, 85.0, 95.0), cv2.LINE_AA)
    for wheel in (x + long // 5, x + long * 4 // 5):
        cv2.circle(canvas, (wheel, y), max(1, tall // 2), (20.0, 20.0, 20.0), -1, cv2.LINE_AA)


def _warm_light(rng: np.random.Generator, canvas: Canvas, horizon: int) -> None:
    """A low sun or a lamp: round and smooth, as bright and warm as a flame."""
    height, width = canvas.shape[:2]
    x, y = rng.uniform(0, width), rng.uniform(0.1, 1.05) * horizon
    radius = rng.uniform(0.03, 0.10) * height
    across = (np.arange(width, dtype=np.float32) - np.float32(x)) ** 2
    down = (np.arange(height, dtype=np.float32) - np.float32(y)) ** 2
    distance = np.sqrt(down[:, None] + across[None, :]) / np.float32(radius)
    glow = np.exp(-distance / 2.2) * np.float32(0.6)
    blend(canvas, np.array([255, 170, 80], np.float32), glow)
    blend(canvas, np.array([255, 240, 190], np.float32), 1 - smoothstep(0.9, 1.1, distance))


def _window(
    canvas: Canvas, centre_x: float, bottom: float, width: float, height: float
) -> tuple[Canvas, slice, slice]:
    """The part of the canvas under a box, and which part of the box it is (clipped at edges)."""
    left, top = int(centre_x - width / 2), int(bottom - height)
    x0, y0 = max(0, left), max(0, top)
    x1, y1 = min(canvas.shape[1], left + int(width)), min(canvas.shape[0], top + int(height))
    return canvas[y0:y1, x0:x1], slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)


def _flames(rng: np.random.Generator, canvas: Canvas, horizon: int) -> None:
    """A cluster of turbulent tongues with a white-hot core, and the glow around them."""
    height, width = canvas.shape[:2]
    high = max(14, int(np.exp(rng.uniform(np.log(0.10), np.log(0.38))) * height))
    wide = max(12, int(high * rng.uniform(0.6, 1.5)))
    x = rng.uniform(0.08, 0.92) * width
    bottom = rng.uniform(horizon * 0.95, height * 0.97)
    rows = np.linspace(1, 0, high, dtype=np.float32)[:, None]  # height above the foot, 0..1
    columns = np.linspace(-1, 1, wide, dtype=np.float32)[None, :]
    sway = octaves(rng, high, wide, cells=3, levels=4, stretch=0.5)
    heat: Canvas = np.zeros((high, wide), dtype=np.float32)
    for _ in range(int(rng.integers(3, 7))):
        foot, top = rng.uniform(-0.55, 0.55), rng.uniform(0.5, 1.0)
        up = np.clip(rows / np.float32(top), 0, 1)
        half = np.float32(rng.uniform(0.22, 0.42)) * (1 - up) ** 0.8 * (0.6 + up) + 1e-3
        offset = np.abs(columns - np.float32(foot) + np.float32(0.16) * sway * (0.3 + rows))
        heat = np.maximum(heat, np.clip(1.25 - offset / half, 0, 1) * (rows < top))
    heat = np.clip(heat * (1.05 - 0.45 * rows) + 0.12 * sway * (heat > 0), 0, 1)
    region, box_rows, box_columns = _window(canvas, x, bottom, 2.4 * wide, 1.9 * high)
    if region.size:
        _glow(region, (int(1.9 * high), int(2.4 * wide)), box_rows, box_columns)
    region, box_rows, box_columns = _window(canvas, x, bottom, wide, high)
    if region.size:
        part = np.ascontiguousarray(heat[box_rows, box_columns])
        blend(region, ramp(part, _FLAME), smoothstep(0.02, 0.35, part))


def _glow(region: Canvas, shape: tuple[int, int], rows: slice, columns: slice) -> None:
    high, wide = shape
    down = np.linspace(-1, 1, high, dtype=np.float32)[:, None]
    across = np.linspace(-1, 1, wide, dtype=np.float32)[None, :]
    alpha = np.clip(1 - np.sqrt(down**2 + across**2), 0, 1) ** 2 * np.float32(0.35)
    blend(region, np.array([230, 110, 35], np.float32), alpha[rows, columns])


def _plume(rng: np.random.Generator, canvas: Canvas, horizon: int, strength: float) -> None:
    """Grey and semi-transparent; narrow where it rises from the ground, widening and leaning."""
    height, width = canvas.shape[:2]
    foot_y = rng.uniform(horizon * 0.95, min(height * 0.9, horizon * 1.45))
    high = max(16, int(foot_y * rng.uniform(0.65, 1.0)))
    wide = max(16, int(high * rng.uniform(0.7, 1.4)))
    up = np.linspace(1, 0, high, dtype=np.float32)[:, None]
    columns = np.linspace(-1, 1, wide, dtype=np.float32)[None, :]
    turbulence = octaves(rng, high, wide, cells=4, levels=6)
    lean = np.float32(rng.uniform(-0.6, 0.6)) * up**1.5
    half = np.float32(rng.uniform(0.04, 0.10)) + np.float32(rng.uniform(0.3, 0.55)) * up**0.8
    body = 1 - np.abs(columns - lean + np.float32(0.10) * turbulence * (0.2 + up)) / half
    alpha = smoothstep(0.0, 0.55, body + np.float32(0.22) * turbulence)
    alpha *= np.float32(rng.uniform(0.8, 1.0) * strength) * (1 - 0.5 * up)
    alpha *= smoothstep(0.0, 0.25, 1 - up)
    shade = np.float32(rng.uniform(55, 215)) * (1 + np.float32(0.2) * turbulence)
    x = rng.uniform(0.15, 0.85) * width
    region, rows, box_columns = _window(canvas, x, foot_y, wide, high)
    if region.size:
        grey = np.repeat(shade[rows, box_columns, None], 3, axis=2)
        blend(region, grey, alpha[rows, box_columns])


def _fog(rng: np.random.Generator, canvas: Canvas, horizon: int) -> None:
    """A horizontal veil around the horizon."""
    height, width = canvas.shape[:2]
    rows = np.arange(height, dtype=np.float32)[:, None]
    spread = np.float32(rng.uniform(0.05, 0.2) * height)
    veil = np.exp(-(((rows - np.float32(horizon)) / spread) ** 2))
    field = octaves(rng, height, width, cells=2, levels=4, stretch=5.0)
    alpha = np.clip(veil * (0.75 + np.float32(0.3) * field), 0, 1)
    shade = np.float32(rng.uniform(150, 225))
    blend(canvas, np.full(3, shade, np.float32), alpha * np.float32(rng.uniform(0.3, 0.8)))


def _expose(rng: np.random.Generator, canvas: Canvas) -> NDArray[np.uint8]:
    """Camera: exposure, white balance, vignette, lens blur and sensor noise."""
    height, width = canvas.shape[:2]
    gain = np.float32(np.exp(rng.normal(-0.05, 0.28)))
    balance = np.exp(rng.normal(0, 0.06, 3)).astype(np.float32)
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None] ** 2
    across = np.linspace(-1, 1, width, dtype=np.float32)[None, :] ** 2
    vignette = 1 - np.float32(rng.uniform(0, 0.18)) * (down + across)
    canvas *= (gain * vignette)[..., None] * balance
    blurred = cv2.GaussianBlur(canvas, (0, 0), float(rng.uniform(0.4, 0.9)))
    grain = rng.standard_normal((height, width), dtype=np.float32) * np.float32(rng.uniform(1.5, 5))
    result: NDArray[np.uint8] = np.clip(blurred + grain[..., None], 0, 255).astype(np.uint8)
    return result
