"""The style sheet of the report's page: dark on light, system fonts, no external resources."""

CSS = """
:root { color-scheme: light; --ink: #1d2430; --muted: #6b7280; --rule: #e3e6ea; --soft: #f6f7f9; --good: #1f7a55; --bad: #b3322a; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 56px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 0 0 4px; letter-spacing: -0.005em; }
section { margin-top: 44px; }
.lead { color: var(--muted); margin: 0 0 14px; max-width: 100ch; }
.plot { display: block; width: 100%; min-width: 680px; height: auto; margin: 16px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--muted); border-bottom: 1.5px solid var(--ink);
  padding: 6px 14px 6px 0; vertical-align: bottom; }
td { border-bottom: 1px solid var(--rule); padding: 6px 14px 6px 0; vertical-align: top; }
th.n, td.n { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 4px; }
tbody tr:hover { background: var(--soft); }
td:first-child { font-weight: 500; }
code { font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
td code.name { white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; }
details { margin-top: 14px; border: 1px solid var(--rule); border-radius: 8px; padding: 8px 14px; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
details[open] > summary { margin-bottom: 8px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 18px; }
article { border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px; background: #fff; }
.images { display: flex; flex-wrap: wrap; gap: 8px; }
.images img { height: 112px; max-width: 100%; image-rendering: pixelated; border-radius: 4px;
  border: 1px solid var(--rule); }
.question { margin: 10px 0 8px; font-weight: 600; overflow-wrap: anywhere; }
article dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: 3px 12px; font-size: 13.5px; }
article dt { color: var(--muted); }
article dd { margin: 0; display: flex; gap: 6px; }
.mark { flex: 0 0 1em; font-weight: 700; }
.right { color: var(--good); }
.cross { color: var(--bad); }
.wrong { color: var(--bad); background: #fbe9e7; text-decoration: line-through; border-radius: 2px; }
footer { margin-top: 48px; border-top: 1px solid var(--rule); padding-top: 14px; }
.environment { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; font-size: 12.5px;
  color: var(--muted); }
.environment dd { margin: 0; }
@media (max-width: 640px) { main { padding: 24px 16px 40px; } }
@media print { section { break-inside: avoid; } details { border: 0; padding: 0; } }
"""
