"""Draws boxes and arrows, described in a TOML file, as SVG: `python tools/draw_picture.py IN.toml OUT.svg`."""

import sys
import tomllib
from html import escape
from pathlib import Path
from typing import Any

CELL_WIDTH, CELL_HEIGHT, GAP = 210, 110, 26
STYLE = """
  text { font: 13px sans-serif; fill: #222; text-anchor: middle; }
  .name { font-weight: bold; }
  .note { font-size: 11px; fill: #555; }
  .beside { text-anchor: start; }
  .box { fill: #eef4fb; stroke: #4a76a8; rx: 6; }
  .group { fill: #fafafa; stroke: #bbb; rx: 10; }
  .arrow { stroke: #444; stroke-width: 1.3; fill: none; marker-end: url(#head); }
  .both { marker-start: url(#head); }
"""

HEAD = """<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto-start-reverse">
<path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker>"""

Rectangle = tuple[float, float, float, float]


def rectangle(at: list[int], margin: float) -> Rectangle:
    """Left, top, width and height of grid cells."""
    column, row, width, height = [*at, *[1, 1][len(at) - 2 :]]
    return (
        column * CELL_WIDTH + margin,
        row * CELL_HEIGHT + margin,
        width * CELL_WIDTH - 2 * margin,
        height * CELL_HEIGHT - 2 * margin,
    )


def draw_rectangle(kind: str, box: Rectangle) -> str:
    left, top, width, height = box
    return f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{height}"/>'


def draw_box(box: Rectangle, text: str) -> list[str]:
    left, top, width, height = box
    name, *notes = text.split("\n")
    x, y = left + width / 2, top + height / 2 + 4 - 8 * len(notes)
    lines = [f'<text class="name" x="{x}" y="{y}">{escape(name)}</text>']
    lines += [f'<text class="note" x="{x}" y="{y + 16 * n}">{escape(note)}</text>' for n, note in enumerate(notes, 1)]
    return [draw_rectangle("box", box), *lines]


def draw_arrow(begin: Rectangle, end: Rectangle, arrow: dict[str, Any]) -> list[str]:
    """A straight arrow between the nearest sides of two boxes in one row or one column."""
    if begin[1] == end[1]:
        y = begin[1] + begin[3] / 2
        x1, x2 = (begin[0] + begin[2], end[0]) if begin[0] < end[0] else (begin[0], end[0] + end[2])
        points, label = (x1, y, x2, y), ((x1 + x2) / 2, begin[1] - 5)
    else:
        x = begin[0] + begin[2] / 2
        y1, y2 = (begin[1] + begin[3], end[1]) if begin[1] < end[1] else (begin[1], end[1] + end[3])
        points, label = (x, y1, x, y2), (x + 8, (y1 + y2) / 2 + 4)
    both = " both" if arrow.get("both") else ""
    drawn = ['<line class="arrow{}" x1="{}" y1="{}" x2="{}" y2="{}"/>'.format(both, *points)]
    if "text" in arrow:
        beside = " beside" if begin[1] != end[1] else ""
        drawn.append(f'<text class="note{beside}" x="{label[0]}" y="{label[1]}">{escape(arrow["text"])}</text>')
    return drawn


def draw(picture: dict[str, Any]) -> str:
    width, height = picture["columns"] * CELL_WIDTH, picture["rows"] * CELL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        HEAD,
    ]
    for group in picture.get("groups", {}).values():
        left, top, wide, high = rectangle(group["at"], 3)
        parts.append(draw_rectangle("group", (left, top, wide, high)))
        parts.append(f'<text class="note" x="{left + wide / 2}" y="{top + high - 8}">{escape(group["text"])}</text>')
    boxes = {name: rectangle(box["at"], GAP) for name, box in picture["boxes"].items()}
    for arrow in picture["arrows"]:
        begin, end = arrow["between"]
        parts += draw_arrow(boxes[begin], boxes[end], arrow)
    for name, box in picture["boxes"].items():
        parts += draw_box(boxes[name], box["text"])
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw(tomllib.loads(Path(source).read_text("utf-8"))), "utf-8")
