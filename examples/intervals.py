"""
Draws a comparison: each variant's difference from the baseline, with its interval.

    python lab/compare.py ladder --json=ladder.json
    python examples/intervals.py ladder.json  # writes ladder.svg, which a browser shows

docs/ladder.svg is this picture. lab/compare.py appends to ladder.json; the script draws the last comparison.
"""
import html
import json
import math
import sys
from pathlib import Path

LEFT, RIGHT, ROW = 200, 780, 36  # ends of the axis and height of a row, in pixels


def ticks(low, high):
    """Three to eight round numbers between low and high"""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= max(n for n in (1, 2, 5) if n == 1 or n * step * 3 <= high - low)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def line(x1, y1, x2, y2, color, width=1, kind='axis'):
    """A line between two points, in pixels"""
    return (f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{color}" '
            f'stroke-width="{width}" class="{kind}"/>')


def text(x, y, content, anchor='middle', kind='title'):
    """A text whose start, end or middle is at x"""
    return (f'<text font-size="14" class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">'
            f'{html.escape(content)}</text>')


def picture(rows):
    """Rows of lab/compare.py -> an SVG file"""
    known = [(row['variant'], row.get('difference') or 0.0, row.get('half_interval') or 0.0) for row in rows]
    low, high = min(mean - half for _, mean, half in known), max(mean + half for _, mean, half in known)
    margin, bottom = 0.05 * (high - low), ROW * len(rows) + 10

    def place(x):
        return LEFT + (RIGHT - LEFT) * (x - low + margin) / (high - low + 2 * margin)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {bottom + 50}" '
             'font-family="sans-serif">',
             '<rect width="100%" height="100%" fill="white"/>', line(LEFT, bottom, RIGHT, bottom, 'black'),
             text((LEFT + RIGHT) / 2, bottom + 42,
                  'difference in validation loss, with 95% interval: left is better')]
    for value in ticks(low, high):
        parts += (line(place(value), 0, place(value), bottom, '#ddd'),
                  text(place(value), bottom + 20, f'{value:g}', kind='x'))
    parts.append(line(place(0), 0, place(0), bottom, 'black'))
    for n, (name, mean, half) in enumerate(known):
        y = ROW * (n + 0.5) + 5
        parts += (text(LEFT - 10, y + 5, name, 'end', 'variant'),
                  line(place(mean - half), y, place(mean + half), y, '#1f77b4', 2, 'interval'),
                  f'<circle cx="{place(mean):.2f}" cy="{y:.2f}" r="5" fill="#1f77b4"/>')
    return '\n'.join([*parts, '</svg>\n'])


if __name__ == '__main__':
    source = Path(sys.argv[1])
    rows = json.loads(source.read_text('utf-8').splitlines()[-1])['rows']
    source.with_suffix('.svg').write_text(picture(rows), 'utf-8')
    print(f'wrote {source.with_suffix(".svg")}')
