"The page that `medlab check --html` writes, opened without a network: it works, and nothing that a file says is executed."
import re

import numpy as np
import pydicom

from many_cases import labelled, make_cases
from medlab.core import printable
from medlab.data.cases import find_cases, inspect_cases
from medlab.data.label_files import find_labelled
from medlab.data.labelled import inspect_all
from medlab.data.volume import Volume
from medlab.preflight.report import Report
from medlab.slices.files import find_slices
from medlab.slices.pairs import inspect_slices
from medlab.slices.series import write_series

EVIL = "<img src=x onerror=alert(1)>"


def test_the_page_in_a_browser(tmp_path, chrome):
    "Light and dark, found and sorted, without a network; a name that is markup stays a name."
    make_cases(tmp_path / "cases", 60)
    (tmp_path / "cases/P00003").rename(tmp_path / "cases" / EVIL)
    for p in (tmp_path / "cases" / EVIL).iterdir(): p.rename(p.with_name(p.name.replace("P00003", EVIL)))
    report = Report(inspect_cases(find_cases(tmp_path / "cases")), (EVIL,))
    report.to_html(tmp_path / "page.html", EVIL)
    shades = {}
    for scheme in ("light", "dark"):
        page = chrome.new_context(color_scheme=scheme).new_page()
        said, asked = [], []
        page.on("console", lambda m, said=said: said.append(m.text)); page.on("pageerror", lambda e, said=said: said.append(str(e)))
        page.on("dialog", lambda d, said=said: said.append("dialog") or d.dismiss())
        page.on("request", lambda r, asked=asked: asked.append(r.url))
        page.goto(f"file://{tmp_path}/page.html")
        assert page.inner_text("#count") == "60 of 60 shown" and page.locator(f"article h3:has-text({EVIL!r})").count() == 1
        shades[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.fill("#find", "truncated"); assert page.inner_text("#count") == "1 of 60 shown"
        page.fill("#find", ""); page.select_option("#kind", "quarantine"); assert page.inner_text("#count") == "1 of 60 shown"
        page.select_option("#kind", ""); page.select_option("#sort", "name")
        assert page.locator("article h3").nth(1).text_content().startswith("P00000")
        first = page.locator("article img").first
        assert first.evaluate("e => { e.loading = 'eager'; return e.decode().then(() => e.naturalWidth) }") == 168
        assert not said and all(u.startswith(("file:", "data:")) for u in asked), (said, asked[:3])
        page.context.close()
    assert shades["light"] != shades["dark"]


HOSTILE = ("<script>ran('script')</script>", "\"><svg onload=ran('svg')>", "' onfocus=ran('focus') autofocus x='", "<img src=x onerror=ran('img')>",
    "<b hidden><style>body{display:none}", "&lt;script&gt;ran('twice')", "${ran('js')}`", "\x1b[2J\x1b]0;title\x07", "a\u202egz.iin\u200f", "line\nbreak\ttab\r", "\x7f\x9b31m", "<!--", "]]><iframe src=data:,>")


def hostile_dicom(root):
    "A series of six slices whose header is markup wherever it is free text."
    noise = np.random.default_rng(0).normal(size=(6, 24, 24)).astype(np.float32)
    root.parent.mkdir(parents=True)
    write_series(Volume(noise * 100, np.diag([1.0, 1, 3, 1])), root)
    for file in root.iterdir():
        ds = pydicom.dcmread(file)
        for name, value in zip(("Manufacturer", "ManufacturerModelName", "SeriesDescription", "PatientID", "StudyDescription"), HOSTILE): setattr(ds, name, value)
        ds.save_as(file)


def test_nothing_that_a_file_says_is_executed(tmp_path, chrome):
    "Names of files and headers of DICOM that are markup, script or control characters are text on the page, and the page's policy would stop them too."
    root = labelled(tmp_path / "data", len(HOSTILE))
    names = [n.replace("/", "∕") for n in HOSTILE]
    for i, n in enumerate(names):
        for folder in ("images", "labels"): (root / folder / f"c{i}.nii.gz").rename(root / folder / f"{n}.nii.gz")
    (root / "images" / f"{names[0]}.nii.gz").write_bytes(b"torn")
    hostile_dicom(tmp_path / "series/<b>p1<b>")
    checks = [c for c, _ in inspect_all(find_labelled(root).cases)] + inspect_slices(find_slices(tmp_path / "series"), hu=False)
    report = Report(checks, HOSTILE)
    assert any(HOSTILE[0] in str(c.facts.get("dicom")) for c in checks) and len(checks) == len(HOSTILE) + 1
    report.to_html(tmp_path / "page.html", HOSTILE[1])
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200f\u202e]", (tmp_path / "page.html").read_text("utf-8") + str(report))
    page, said = chrome.new_context().new_page(), []
    page.add_init_script("window.all_ran = []; window.ran = x => window.all_ran.push(x)")
    for kind in ("console", "pageerror", "dialog"): page.on(kind, lambda m, kind=kind: said.append((kind, str(m))))
    page.goto(f"file://{tmp_path}/page.html")
    page.fill("#find", "onerror"); page.fill("#find", ""); page.select_option("#sort", "name")
    shown = page.locator("article h3").all_text_contents()
    assert all(any(t.startswith(printable(n)) for t in shown) for n in names if "\n" not in n and "\t" not in n), shown
    assert page.evaluate("window.all_ran") == [] and not said
    assert page.locator("script").count() == 1 == page.locator("style").count() and not page.locator("iframe, body b:not(.tile b), body style").count()
    assert page.evaluate("[...document.querySelectorAll('*')].every(e => [...e.attributes].every(a => !a.name.startsWith('on')))")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"ran(1)\"><iframe srcdoc=\"<script>parent.ran(2)</script>\"></iframe>')")
    page.wait_for_timeout(500)
    assert page.evaluate("window.all_ran") == [] and any("Content Security Policy" in t for _, t in said), "planted: the policy stops what escaping would let through"
    page.context.close()
