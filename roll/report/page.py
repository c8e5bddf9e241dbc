"""The looks and the player of the HTML pages: no outside resource, no library."""

from __future__ import annotations

from html import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src 'self' data: file:"
"""Content security policy: a second fence behind the escaping of the model's words."""

STYLE = """
:root { color-scheme: light dark; --bg:#f5f3ee; --card:#fff; --ink:#20242c; --dim:#727a88; --line:#e0dcd2;
  --good:#1f8a4d; --bad:#c8402f; --accent:#2563c9; --code:#f7f5f0 }
@media (prefers-color-scheme: dark) { :root { --bg:#14171d; --card:#1d2129; --ink:#e7e9ee; --dim:#939baa;
  --line:#2f3541; --good:#55c98a; --bad:#f2705f; --accent:#7aa8ff; --code:#171a21 } }
* { box-sizing: border-box }
body { margin:0 auto; padding:28px 20px 40px; max-width:1020px; background:var(--bg); color:var(--ink);
  font:16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
h1 { font-size:24px; line-height:1.2; margin:0 0 12px }
h2 { font-size:12px; font-weight:600; letter-spacing:.06em; text-transform:uppercase; color:var(--dim); margin:0 0 6px }
.chips { display:flex; flex-wrap:wrap; gap:8px; margin-bottom:20px }
.chip { padding:2px 11px; border-radius:99px; border:1px solid var(--line); background:var(--card); font-size:14px;
  color:var(--dim) }
.chip b { color:var(--ink); font-weight:600 }
.good, .chip b.good { color:var(--good) } .bad, .chip b.bad { color:var(--bad) }
.card, .frame { background:var(--card); border:1px solid var(--line); border-radius:16px; padding:22px;
  margin-bottom:16px }
.frame { display:grid; grid-template-columns:minmax(0,46%) minmax(0,1fr); gap:26px }
.playing .frame { display:none } .playing .frame.on { display:grid }
.board { display:block; width:100%; max-width:440px; border-radius:10px }
pre { margin:0; padding:13px 15px; border-radius:10px; background:var(--code); border:1px solid var(--line);
  font:14px/1.55 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; white-space:pre-wrap;
  overflow-wrap:anywhere; max-height:320px; overflow:auto }
.said { min-height:92px } .side > * + h2 { margin-top:18px }
.around { color:var(--dim); margin-top:10px; font-size:12.5px; max-height:160px }
.action { font-size:21px; font-weight:600 } .action.none { color:var(--bad) }
table.rewards { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
.rewards td { padding:5px 0; border-top:1px solid var(--line) } .rewards tr:first-child td { border-top:0 }
.rewards td:last-child { text-align:right; font-weight:600 }
.verdict { font-size:26px; font-weight:700; margin:0 0 4px }
.controls { display:flex; align-items:center; gap:8px; flex-wrap:wrap }
button { font:inherit; color:var(--ink); background:var(--card); border:1px solid var(--line); border-radius:10px;
  min-width:42px; height:38px; padding:0 12px; cursor:pointer }
button:hover { border-color:var(--accent) }
button:focus-visible { outline:2px solid var(--accent); outline-offset:2px }
#play { background:var(--accent); border-color:var(--accent); color:#fff; min-width:88px; font-weight:600 }
@media (prefers-color-scheme: dark) { #play { color:#14171d } }
.dots { display:flex; flex-wrap:wrap; gap:6px; margin-left:8px }
.dot { min-width:0; width:26px; height:26px; padding:0; border-radius:50%; font-size:12px; color:var(--dim) }
.dot.on { background:var(--ink); border-color:var(--ink); color:var(--card); font-weight:700 }
.dot.up { border-color:var(--good) } .dot.down { border-color:var(--bad) }
.hint { color:var(--dim); font-size:13px; margin:10px 0 0 }
.episodes { display:grid; grid-template-columns:repeat(auto-fill, minmax(250px, 1fr)); gap:16px }
.episode { display:block; color:inherit; text-decoration:none; background:var(--card); border:1px solid var(--line);
  border-radius:14px; overflow:hidden }
.episode:hover { border-color:var(--accent) } .episode img { display:block; width:100%; background:#14171d }
.episode p { margin:0; padding:10px 14px 12px; font-size:14px; color:var(--dim) }
.answers { border-collapse:collapse; width:100%; font-size:14px } .answers pre { max-height:220px; padding:8px 10px }
.answers th { text-align:left; color:var(--dim); font-weight:600; padding:0 8px 8px }
.answers td { vertical-align:top; padding:8px; border-top:1px solid var(--line); overflow-wrap:anywhere }
.curve svg { display:block; width:100%; height:auto }
h3 { margin:26px 0 10px; font-size:17px }
@media (max-width:720px) { .frame { grid-template-columns:1fr } }
"""

PLAYER = """
(function () {
  var frames = Array.from(document.querySelectorAll('.frame')), dots = Array.from(document.querySelectorAll('.dot'));
  var play = document.getElementById('play'), at = 0, timer = null;
  function show(i) {
    at = Math.max(0, Math.min(frames.length - 1, i));
    frames.forEach(function (f, k) { f.classList.toggle('on', k === at); });
    dots.forEach(function (d, k) { d.classList.toggle('on', k === at); });
  }
  function stop() { clearInterval(timer); timer = null; play.textContent = '\\u25B6 Play'; }
  function start() {
    if (at === frames.length - 1) show(0);
    play.textContent = '\\u275A\\u275A Pause';
    timer = setInterval(function () { if (at === frames.length - 1) stop(); else show(at + 1); }, 1100);
  }
  function toggle() { if (timer) stop(); else start(); }
  function go(i) { stop(); show(i); }
  play.onclick = toggle;
  document.getElementById('first').onclick = function () { go(0); };
  document.getElementById('back').onclick = function () { go(at - 1); };
  document.getElementById('next').onclick = function () { go(at + 1); };
  document.getElementById('last').onclick = function () { go(frames.length - 1); };
  dots.forEach(function (d, k) { d.onclick = function () { go(k); }; });
  document.addEventListener('keydown', function (e) {
    if (e.key === 'ArrowRight') go(at + 1);
    else if (e.key === 'ArrowLeft') go(at - 1);
    else if (e.key === 'Home') go(0);
    else if (e.key === 'End') go(frames.length - 1);
    else if (e.key === ' ' && e.target.tagName !== 'BUTTON') toggle();
    else return;
    e.preventDefault();
  });
  document.body.classList.add('playing');
  show(0);
})();
"""


MAX_SHOWN = 20_000
"""Characters of one text on a page: a browser shows them at once, and nobody reads more."""


def shortened(text: str) -> str:
    """The beginning of a very long text, and how much is left out."""
    left_out = len(text) - MAX_SHOWN
    return text if left_out <= 0 else f"{text[:MAX_SHOWN]}… ({left_out:,} more characters)"


def html_page(title: str, body: str, script: str = "") -> str:
    """A whole page; ``title`` is plain text, ``body`` is HTML that is already escaped."""
    tail = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>{body}{tail}</body></html>\n"
    )
