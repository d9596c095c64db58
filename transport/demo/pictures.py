"""The demo's two pictures, drawn with Pillow: what the stages found, and how fast each way of running them was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

INK, FAINT, PAPER, PANEL = (236, 239, 244), (150, 158, 172), (22, 25, 31), (38, 43, 53)
BARS = ((129, 140, 158), (208, 135, 112), (94, 196, 182), (235, 203, 139))
CORNER = (255, 214, 64)
TILE = (392, 294)
GAP, MARGIN = 12, 32
COLUMNS = (
    "as photographed, with noise",
    "denoised and tone-mapped",
    "edges: 8 oriented filters, thinned",
    "Harris corners",
)


def font(size: int) -> Any:
    """Pillow's own font at a size; its small bitmap font where Pillow has no FreeType.  Does not touch the device."""
    return ImageFont.load_default(size)


def contact_sheet(path: Path, title: str, shots: list[tuple[str, Any, dict[str, Any]]]) -> None:
    """Writes the sheet: for every (caption, frame, output) the whole frame, then a detail of it at full size.

    Frames are (3, height, width) float32, outputs those of the last stage, on the host.  Blocks the host.
    """
    width, height = TILE
    sheet_width = 2 * MARGIN + 4 * width + 3 * GAP
    row_height = height + 34
    sheet = Image.new("RGB", (sheet_width, 118 + 2 * len(shots) * row_height + MARGIN - 10), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, 24), title, INK, font(26))
    for column, text in enumerate(COLUMNS):
        draw.text((MARGIN + column * (width + GAP), 76), text, FAINT, font(17))
    top = 106
    taken: list[tuple[int, int]] = []
    for caption, frame, output in shots:
        left, up = _liveliest(output, taken)
        taken.append((left, up))
        for detail in (False, True):
            for column, picture in enumerate(_tiles(frame, output, (left, up) if detail else None)):
                sheet.paste(picture, (MARGIN + column * (width + GAP), top))
            if not detail:
                scale = width / frame.shape[2]
                box = [MARGIN + left * scale, top + up * scale]
                draw.rectangle([*box, box[0] + width * scale, box[1] + height * scale], outline=INK, width=2)
            text = f"{caption}: the framed detail at full size" if detail else f"{caption}, whole"
            draw.text((MARGIN, top + height + 6), text, FAINT, font(15))
            top += row_height
    sheet.save(path, optimize=True)


def bar_chart(path: Path, title: str, subtitle: str, bars: list[tuple[str, str, float]]) -> None:
    """Writes a chart of (label, remark, frames a second), one bar each, from zero.  Blocks the host."""
    fine = 2  # drawn twice as large, since Pillow's shapes have hard edges
    width, left, right, step = 1400 * fine, 430 * fine, 150 * fine, 92 * fine
    margin, bottom = MARGIN * fine, 122 * fine + step * len(bars)
    chart = Image.new("RGB", (width, bottom + 56 * fine), PAPER)
    draw = ImageDraw.Draw(chart)
    draw.text((margin, 26 * fine), title, INK, font(28 * fine))
    draw.text((margin, 68 * fine), subtitle, FAINT, font(18 * fine))
    longest = max((value for *_, value in bars), default=0.0) or 1.0
    span = width - left - right
    for tick in _ticks(longest):
        x = left + span * tick / longest
        draw.line([(x, 118 * fine), (x, bottom)], fill=PANEL, width=2 * fine)
        draw.text((x, bottom + 8 * fine), f"{tick:g}", FAINT, font(16 * fine), anchor="ma")
    draw.text((width - margin, bottom + 8 * fine), "frames/s", FAINT, font(16 * fine), anchor="ra")
    for number, (label, remark, value) in enumerate(bars):
        y = 130 * fine + step * number
        draw.text((margin, y + 10 * fine), label, INK, font(21 * fine))
        draw.text((margin, y + 38 * fine), remark, FAINT, font(15 * fine))
        box = [left, y + 4 * fine, left + max(3.0 * fine, span * value / longest), y + 64 * fine]
        draw.rounded_rectangle(box, radius=6 * fine, fill=BARS[number % len(BARS)])
        draw.text((box[2] + 14 * fine, y + 34 * fine), f"{value:.2f}", INK, font(24 * fine), anchor="lm")
    chart.resize((width // fine, chart.height // fine), Image.Resampling.LANCZOS).save(path, optimize=True)


def _ticks(longest: float) -> list[float]:
    step = 10.0 ** np.floor(np.log10(longest / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if longest / (step * factor) <= 6)
    return [round(step * number, 10) for number in range(int(longest / step) + 1)]


def _tiles(frame: Any, output: dict[str, Any], detail: tuple[int, int] | None) -> list[Any]:
    """The four pictures of one row: the whole image made small, or the rectangle at `detail` as it is."""
    rows, columns = slice(None), slice(None)
    if detail is not None:
        columns, rows = slice(detail[0], detail[0] + TILE[0]), slice(detail[1], detail[1] + TILE[1])
    photograph = _picture((frame[:, rows, columns] * 255 + 0.5).astype(np.uint8))
    toned = _picture(output["image"][:, rows, columns])
    found = _picture(np.broadcast_to(output["edges"][None, rows, columns], (3, *output["edges"][rows, columns].shape)))
    if detail is None:
        found = found.point(lambda value: min(255, 3 * value))  # thin lines fade when an image is made small
    marked = Image.blend(toned, Image.new("RGB", TILE, (0, 0, 0)), 0.35)
    draw = ImageDraw.Draw(marked)
    scores = output["corners"][rows, columns]
    scale_x, scale_y = TILE[0] / scores.shape[1], TILE[1] / scores.shape[0]
    for y, x in _peaks(scores, max(8, round(14 / min(scale_x, scale_y, 1.0)))):
        x, y = x * scale_x, y * scale_y
        draw.ellipse([x - 3, y - 3, x + 3, y + 3], outline=CORNER, width=1)
    return [photograph, toned, found, marked]


def _picture(planes: Any) -> Any:
    picture = Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))
    return picture if picture.size == TILE else picture.resize(TILE, Image.Resampling.BOX)


def _liveliest(output: dict[str, Any], taken: list[tuple[int, int]]) -> tuple[int, int]:
    """Left and top of the rectangle of a tile's size with the most edges, two tiles or more from those `taken`."""
    height, width = output["edges"].shape
    best, place = -1.0, (0, 0)
    for top in range(0, max(1, height - TILE[1] + 1), TILE[1] // 3):
        for left in range(0, max(1, width - TILE[0] + 1), TILE[0] // 3):
            if any(abs(left - x) < 2 * TILE[0] and abs(top - y) < 2 * TILE[1] for x, y in taken):
                continue
            score = float(output["edges"][top : top + TILE[1], left : left + TILE[0]].mean())
            if score > best:
                best, place = score, (left, top)
    return place


def _peaks(scores: Any, block: int, least: float = 0.6) -> list[tuple[int, int]]:
    """The highest score of each block, if it is high enough, as (row, column)."""
    rows, columns = scores.shape[0] // block, scores.shape[1] // block
    cut = scores[: rows * block, : columns * block]
    blocks = cut.reshape(rows, block, columns, block).swapaxes(1, 2).reshape(rows, columns, block * block)
    place = blocks.argmax(axis=-1)
    high = np.take_along_axis(blocks, place[..., None], -1)[..., 0] > least
    return [
        (int(row * block + place[row, column] // block), int(column * block + place[row, column] % block))
        for row, column in zip(*np.nonzero(high), strict=True)
    ]
