"""
Draws the losses of one or several runs: training as a thin line, and validation as a line with marks.

    python examples/plot.py out out-b  # writes losses.svg, which a browser shows

The script reads log.csv in each folder. An SVG picture is text, so the script needs no further package.
To draw another column, add its name to COLUMNS.
"""
import csv
import html
import math
import sys
from pathlib import Path

COLUMNS = {'loss': (0.8, 0), 'val_loss': (2, 3.5)}  # width of the line, radius of the marks
COLORS = '#1f77b4', '#d62728', '#2ca02c', '#9467bd', '#ff7f0e', '#17becf', '#8c564b', '#e377c2'
LEFT, RIGHT, TOP, BOTTOM = 60, 780, 30, 450  # ends of the axes, in a picture of 800 x 500 pixels


def read_lines(folder):
    """{column of log.csv: [(millions of tokens, value)]}, without empty cells and NaN"""
    rows = [*csv.DictReader(Path(folder, 'log.csv').read_text('utf-8').splitlines())]
    return {name: [(int(row['tokens']) / 1e6, float(row[name])) for row in rows
                   if math.isfinite(float(row[name] or 'nan'))] for name in COLUMNS}


def round_numbers(low, high):
    """Three to eight round numbers between low and high"""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= max(n for n in (1, 2, 5) if n == 1 or n * step * 3 <= high - low)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def line(points, color, width=1, kind='axis'):
    """points: [(x, y)] in pixels"""
    places = ' '.join(f'{x:.2f},{y:.2f}' for x, y in points)
    return f'<polyline class="{kind}" fill="none" stroke="{color}" stroke-width="{width}" points="{places}"/>'


def text(x, y, content, anchor='middle', kind='title'):
    """A text whose start, end or middle is at x"""
    return (f'<text font-size="13" class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">'
            f'{html.escape(content)}</text>')


def picture(runs):
    """{name: lines} -> an SVG file"""
    points = [point for lines in runs.values() for values in lines.values() for point in values]
    xs, ys = zip(*points or sys.exit('the logs have no losses yet'))
    margin = 0.05 * (max(ys) - min(ys)) or 1
    longest, low, high = max(xs), min(ys) - margin, max(ys) + margin

    def place(x, y):
        return LEFT + (RIGHT - LEFT) * x / longest, BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 500" font-family="sans-serif">',
             '<rect width="100%" height="100%" fill="white"/>',
             line([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], 'black'),
             text((LEFT + RIGHT) / 2, BOTTOM + 40, 'million tokens'),
             text(LEFT, TOP - 10, 'loss (thin: training, with marks: validation)', 'start')]
    for value in round_numbers(low, high):
        _, y = place(0, value)
        parts += line([(LEFT, y), (RIGHT, y)], '#ddd'), text(LEFT - 6, y + 4, f'{value:g}', 'end', 'y')
    for value in round_numbers(0, longest):
        x, _ = place(value, 0)
        parts += line([(x, BOTTOM), (x, BOTTOM + 5)], 'black'), text(x, BOTTOM + 20, f'{value:g}', kind='x')
    for n, (name, lines) in enumerate(runs.items()):
        color, y = COLORS[n % len(COLORS)], TOP + 15 + 18 * n
        parts += line([(RIGHT - 24, y), (RIGHT, y)], color, 3), text(RIGHT - 30, y + 4, name, 'end', 'run')
        for column, (width, radius) in COLUMNS.items():
            places = [place(*point) for point in lines[column]]
            parts.append(line(places, color, width, column))
            parts += [f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="{color}"/>'
                      for x, y in places if radius]
    return '\n'.join([*parts, '</svg>\n'])


if __name__ == '__main__':
    runs = {folder: read_lines(folder) for folder in sys.argv[1:] or ['out']}
    Path('losses.svg').write_text(picture(runs), 'utf-8')
    print('wrote losses.svg')
