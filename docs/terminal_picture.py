"""Terminal sessions as SVG: commands and what they printed, with no line cut off."""

import textwrap
from dataclasses import dataclass
from html import escape

COLUMNS = 108
NO_BREAK_SPACE = "&#160;"  # runs of plain spaces would become one
FONT_SIZE, CHAR_WIDTH, LINE_HEIGHT, MARGIN = 14, 8.4, 20, 18
BACKGROUND, PROMPT, COMMAND, OUTPUT = "#1d2330", "#7ec699", "#ffffff", "#c9d1d9"


@dataclass(frozen=True)
class Recording:
    """A command line and everything that it printed."""

    command: str
    output: str


def draw(recordings: list[Recording]) -> str:
    """Draw the recordings one below the other as an SVG; lines that are too long are wrapped."""
    rows: list[list[tuple[str, str]]] = []  # of (colour, text)
    for recording in recordings:
        rows.append([(PROMPT, "$ "), (COMMAND, recording.command)])
        rows += [[(OUTPUT, line)] for line in wrap(recording.output)]
        rows.append([])
    rows.pop()
    width = 2 * MARGIN + COLUMNS * CHAR_WIDTH
    height = 2 * MARGIN + len(rows) * LINE_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        f'font-size="{FONT_SIZE}">',
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{BACKGROUND}"/>',
    ]
    for index, row in enumerate(rows):
        column, y = 0, MARGIN + index * LINE_HEIGHT + FONT_SIZE
        for colour, text in row:
            lines += text_at(column, y, colour, text)
            column += len(text)
    return "\n".join([*lines, "</svg>", ""])


def wrap(output: str) -> list[str]:
    lines = output.rstrip("\n").split("\n")
    return [part for line in lines for part in textwrap.wrap(line, COLUMNS, drop_whitespace=True) or [""]]


def text_at(column: int, y: float, colour: str, text: str) -> list[str]:
    """Return a line of text whose width does not depend on the font that the reader has."""
    stripped = text.strip()
    if not stripped:
        return []
    x = MARGIN + (column + len(text) - len(text.lstrip())) * CHAR_WIDTH
    width = len(stripped) * CHAR_WIDTH
    return [
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" textLength="{width:g}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(stripped).replace(" ", NO_BREAK_SPACE)}</text>'
    ]
