"""Writes small pictures as SVG: boxes and text, in units of pixels."""

from __future__ import annotations

import html
import pathlib


class Svg:
    def __init__(self, width: float, height: float) -> None:
        self._size = (width, height)
        self._parts: list[str] = []

    def box(self, x, y, width, height, fill: str, label: str = "") -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" stroke="white" stroke-width="0.5"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + 4, label, "middle")

    def text(self, x, y, text: str, anchor: str = "start") -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )

    def write(self, path: str) -> None:
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/>'
        )
        pathlib.Path(path).write_text("\n".join([head, *self._parts, "</svg>\n"]))
