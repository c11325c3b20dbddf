"""The style sheet of the report page: light and dark, screen, phone and paper."""

from __future__ import annotations

__all__ = ["STYLE"]

_LIGHT = """
--paper:#fff;--ink:#1b2027;--muted:#5c6773;--line:#e2e6ea;--track:#eef1f4;--on-fill:#fff;
--c1:#1f5fa8;--c2:#c2521a;--c3:#147a70;--c4:#7b4fa0;--c5:#7c8794;color-scheme:light;
"""

_DARK = """
--paper:#12161b;--ink:#e5e9ed;--muted:#9aa6b2;--line:#2a323b;--track:#1f262e;--on-fill:#12161b;
--c1:#6eaaf0;--c2:#f0965a;--c3:#54c3b2;--c4:#b696e2;--c5:#8994a1;color-scheme:dark;
"""

STYLE = f"""
:root{{{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
-webkit-text-size-adjust:100%;text-size-adjust:100%}}
main{{max-width:1080px;margin:0 auto;padding:40px 24px 56px}}
header{{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline;
border-bottom:2px solid var(--ink);padding-bottom:12px}}
h1{{font-size:26px;line-height:1.25;font-weight:650;letter-spacing:-.01em;margin:0;overflow-wrap:anywhere}}
header p{{margin:0;color:var(--muted);font-variant-numeric:tabular-nums}}
header .status{{margin-left:auto;color:var(--ink);font-weight:600;overflow-wrap:anywhere}}
h2{{font-size:15px;font-weight:650;margin:0 0 2px}}
.note{{margin:0;color:var(--muted);font-size:13px;font-variant-numeric:tabular-nums}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:20px 28px;margin:26px 0 36px}}
.figures dt{{color:var(--muted);font-size:13px}}
.figures dd{{margin:0;font-variant-numeric:tabular-nums}}
.figures strong{{display:block;font-size:25px;line-height:1.3;font-weight:600;letter-spacing:-.01em;white-space:nowrap}}
.figures dd span{{color:var(--muted);font-size:13px}}
.row{{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:36px 48px;margin-bottom:40px}}
.row.lead{{grid-template-columns:minmax(0,1.85fr) minmax(0,1fr)}}
figure{{margin:0;min-width:0;break-inside:avoid}}
section{{min-width:0;margin:0 0 36px;break-inside:avoid}}
.row>section{{margin:0}}
ul.legend{{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;margin:4px 0 0;padding:0;
font-size:13px;color:var(--muted);font-variant-numeric:tabular-nums}}
ul.legend i{{display:inline-block;width:14px;height:10px;border-radius:2px;margin-right:6px}}
ul.legend i.thin{{height:3px;vertical-align:3px}}
ul.legend i.thin.pale{{opacity:.4}}
ul.legend i.round{{width:9px;height:9px;border-radius:50%}}
.bg1{{background:var(--c1)}}.bg2{{background:var(--c2)}}.bg3{{background:var(--c3)}}
.bg4{{background:var(--c4)}}.bg5{{background:var(--c5)}}
svg{{display:block;width:100%;height:auto;margin-top:10px;overflow:visible;font-size:12px;
font-variant-numeric:tabular-nums}}
svg text{{fill:var(--muted)}}
svg text.name,svg text.value{{fill:var(--ink);font-size:13px}}
svg text.value{{fill:var(--muted)}}
svg text.inside{{fill:var(--on-fill);font-size:12px;font-weight:600}}
.grid,.axis,.mark,.curve{{fill:none;vector-effect:non-scaling-stroke}}
.grid{{stroke:var(--line)}}.axis{{stroke:var(--muted)}}
.mark{{stroke:var(--c2);stroke-width:2}}
.curve{{stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}}
.faint{{stroke-width:1;opacity:.38}}
.marked{{stroke-dasharray:3 4;stroke-width:1.25}}
.dot{{stroke:var(--paper);stroke-width:1.5}}
.line1{{stroke:var(--c1)}}.line2{{stroke:var(--c2)}}.line3{{stroke:var(--c3)}}
.line4{{stroke:var(--c4)}}.line5{{stroke:var(--c5)}}
.fill1{{fill:var(--c1)}}.fill2{{fill:var(--c2)}}.fill3{{fill:var(--c3)}}
.fill4{{fill:var(--c4)}}.fill5{{fill:var(--c5)}}.track{{fill:var(--track)}}
table{{border-collapse:collapse;width:100%;font-size:14px;margin-top:8px;font-variant-numeric:tabular-nums}}
th,td{{text-align:left;vertical-align:top;font-weight:400;padding:5px 0;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}}
th{{color:var(--muted);padding-right:16px;width:44%}}
table.wide{{font-size:13px}}
table.wide th{{width:30%}}
pre{{margin:8px 0 0;padding:14px 16px;background:var(--track);border-radius:4px;overflow:auto;max-height:32rem;
font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;tab-size:4}}
pre.wrap{{white-space:pre-wrap;overflow-wrap:anywhere}}
.empty{{border:1px solid var(--line);border-radius:4px;padding:16px;color:var(--muted);margin:10px 0 0}}
.lone{{margin:26px 0 36px}}
@media (max-width:820px){{.row,.row.lead{{grid-template-columns:minmax(0,1fr)}}}}
@media (max-width:560px){{
main{{padding:20px 16px 40px}}
h1{{font-size:22px}}
header .status{{margin-left:0}}
.figures{{grid-template-columns:repeat(2,minmax(0,1fr))}}
svg.plot{{font-size:17px}}
svg.large{{font-size:22px}}
svg text.name,svg text.value{{font-size:18px}}
svg text.inside{{font-size:16px}}
}}
@media print{{
:root{{{_LIGHT}}}
body{{font-size:11pt;print-color-adjust:exact;-webkit-print-color-adjust:exact}}
main{{max-width:none;padding:0}}
.row{{gap:24px 32px;margin-bottom:24px}}
svg.plot{{font-size:16px}}
svg.large{{font-size:20px}}
svg text.name,svg text.value,svg text.inside{{font-size:16px}}
.row{{grid-template-columns:repeat(2,minmax(0,1fr))}}
.row.lead{{grid-template-columns:minmax(0,1.85fr) minmax(0,1fr)}}
pre{{max-height:none;white-space:pre-wrap;overflow-wrap:anywhere}}
section.long{{break-inside:auto}}
h2{{break-after:avoid}}
}}
"""
"""CSS for the page and for the classes that the plots use."""
