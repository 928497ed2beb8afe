"""Whatever way a scan lies, a voxel is read where the file says that it is: to a thousandth of a millimetre, by examples that are drawn.

The oracle shares no code with the readers: the equation of the standard for DICOM (PS3.3 C.7.6.2.1-1), the rows of the sform and the
formula of the quaternion for NIfTI. Every voxel of a test volume holds a number of its own, so it can be found wherever it went.
MEDLAB_EXAMPLES=20 draws twenty times as many examples."""
import os
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from nibabel.affines import apply_affine
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (CTImageStorage, EnhancedCTImageStorage, EnhancedMRImageStorage, ExplicitVRLittleEndian,
                         OphthalmicTomographyImageStorage, generate_uid)
from pydicom.valuerep import format_number_as_ds

from medlab import Trainer, recipes
from medlab.core import UserError
from medlab.data.dicom import read_dicom
from medlab.data.label_files import find_labelled
from medlab.data.volume import Volume, read_volume, write_volume
from medlab.geometry.options import DicomOptions
from medlab.oct.files import find_oct
from medlab.oct.scans import read_oct_dicom
from medlab.slices.coding import content_of
from medlab.slices.files import FILL, find_slices
from medlab.slices.pairs import load_slices
from test_cli import said

TIMES = int(os.environ.get("MEDLAB_EXAMPLES", "1"))
DATA = Path(os.environ.get("MEDLAB_DATA", Path(__file__).parents[2] / "../shared/data")) / "dicom"
LPS = np.diag([-1.0, -1, 1, 1])
MM = 1e-3  # of the promise


def drawn(n):
    "So many examples, the same each time; a failing one is made small where more were asked for, which takes minutes."
    phases = [p for p in Phase if p not in (Phase.shrink, Phase.explain) or TIMES > 1]
    return settings(max_examples=n * TIMES, deadline=None, derandomize=True, database=None, phases=phases,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


sizes, gaps = st.floats(0.1, 10), st.floats(0.1, 10)


@st.composite
def rotations(draw):
    "A rotation: along the axes of the patient, in any of 24 ways, or any other."
    if draw(st.booleans()):
        order, signs = draw(st.permutations(range(3))), draw(st.tuples(*[st.sampled_from((-1, 1))] * 3))
        turn = np.eye(3)[:, list(order)] * signs
        return turn * (1, 1, np.linalg.det(turn))
    w, x, y, z = q = np.array(draw(st.tuples(*[st.floats(-1, 1)] * 4)))
    assume(np.linalg.norm(q) > 0.1)
    w, x, y, z = q / np.linalg.norm(q)
    return np.array([[1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
                     [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
                     [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]])


@st.composite
def stacks(draw, slices=(2, 6), tilted=True):
    "Where the slices of a series lie, and in which order its files come."
    turn, pixel, gap, n = draw(rotations()), np.array([draw(sizes), draw(sizes)]), draw(gaps), draw(st.integers(*slices))
    aside = np.array(draw(st.tuples(*[st.floats(-0.6, 0.6)] * 2))) if tilted and draw(st.booleans()) else np.zeros(2)
    origin = np.array(draw(st.tuples(*[st.floats(-500, 500)] * 3)))
    step = turn @ np.array([*gap * aside, draw(st.sampled_from((-1, 1))) * gap])
    numbers = draw(st.sampled_from(("grow", "fall", "none", "shuffled")))
    return dict(turn=turn, pixel=pixel, step=step, origin=origin, shape=(n, draw(st.integers(2, 5)), draw(st.integers(2, 6))),
                names=draw(st.permutations(range(n))), order=draw(st.permutations(range(n))), numbers=numbers)


def number(values): return [format_number_as_ds(float(v) if abs(v) > 1e-30 else 0.0) for v in values]


def head(kind, frames=0, **tags):
    "A data set without place and pixels."
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    tags = dict(SOPClassUID=kind, SOPInstanceUID=generate_uid(), SeriesInstanceUID="1.2.3", StudyInstanceUID="1.2", Modality="CT",
        SeriesNumber=1, SamplesPerPixel=1, PhotometricInterpretation="MONOCHROME2", BitsAllocated=16, BitsStored=16, HighBit=15,
        PixelRepresentation=1, FrameOfReferenceUID="1.2.4", PatientID="P-7", PatientName="Drawn^By") | tags
    for k, v in tags.items(): setattr(ds, k, v)
    if frames: ds.NumberOfFrames = frames
    return ds


def numbered(shape):
    "Voxels, each with a number of its own."
    return np.arange(np.prod(shape)).reshape(shape).astype(np.int16)


def place(s, k): return number(s["origin"] + k * s["step"])


def orientation(s): return number(s["turn"][:, :2].T.reshape(-1))


def save(ds, planes, path):
    "Write a file."
    planes = np.asarray(planes)
    ds.Rows, ds.Columns = planes.shape[-2:]
    ds.PixelData = np.ascontiguousarray(planes, "<i2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    ds.save_as(path, enforce_file_format=True)
    return ds


def write_classic(folder, s, data=None, slope=None):
    "A file for each slice; the slices that were written, in their order."
    data, made = numbered(s["shape"]) if data is None else data, []
    n = len(data)
    for k in range(n):
        ds = head(CTImageStorage, ImagePositionPatient=place(s, k), ImageOrientationPatient=orientation(s),
            PixelSpacing=number(s["pixel"][::-1]), SliceThickness=number([abs(s["step"] @ s["turn"][:, 2])])[0])
        if slope: ds.RescaleSlope, ds.RescaleIntercept = number([slope])[0], "0"
        told = dict(grow=k + 1, fall=n - k, shuffled=s["order"][k % len(s["order"])] + 1)
        if s["numbers"] in told: ds.InstanceNumber = told[s["numbers"]]
        made.append(save(ds, data[k], folder / f"IM{s['names'][k % len(s['names'])]:03}{k // len(s['names'])}"))
    return made


def group(**sequences):
    "An item of functional groups."
    made = Dataset()
    for name, tags in sequences.items():
        inner = Dataset()
        for tag, value in tags.items(): setattr(inner, tag, value)
        setattr(made, name, [inner])
    return made


KINDS = dict(CT=EnhancedCTImageStorage, MR=EnhancedMRImageStorage, OPT=OphthalmicTomographyImageStorage)


def groups(s, shared=("orientation", "measures", "values"), stack=None):
    "(shared item, items of the frames in the order of the file): what is not shared stands with every frame."
    whole = dict(orientation=dict(PlaneOrientationSequence=dict(ImageOrientationPatient=orientation(s))),
        measures=dict(PixelMeasuresSequence=dict(PixelSpacing=number(s["pixel"][::-1]), SliceThickness=number([abs(s["step"] @ s["turn"][:, 2])])[0])),
        values=dict(PixelValueTransformationSequence=dict(RescaleSlope="2", RescaleIntercept="-10", RescaleType="US")))
    common = {k: v for name, part in whole.items() if name in shared for k, v in part.items()}
    own = {k: v for name, part in whole.items() if name not in shared for k, v in part.items()}
    frame = lambda k: group(PlanePositionSequence=dict(ImagePositionPatient=place(s, k)),
        FrameContentSequence=dict(StackID=stack, InStackPositionNumber=k + 1) if stack else dict(TemporalPositionIndex=1), **own)
    return group(**common), [frame(k) for k in s["order"]]


def enhanced(kind, s, shared, stack=None):
    "(data set, its planes) of an Enhanced file."
    common, frames = groups(s, shared, stack)
    ds = head(KINDS[kind], len(frames), Modality=kind, InstanceNumber=1)
    ds.SharedFunctionalGroupsSequence, ds.PerFrameFunctionalGroupsSequence = [common], frames
    return ds, numbered(s["shape"])[list(s["order"])]


def expected(s, slope=1, intercept=0):
    "((n, 3) RAS mm, (n,) values) of every voxel, by PS3.3 C.7.6.2.1-1 with the numbers that a header can hold."
    x, y = np.array(orientation(s), float).reshape(2, 3)
    down, across = np.array(number(s["pixel"][::-1]), float)
    k, j, i = (a.reshape(-1, 1) for a in np.indices(s["shape"]))
    at = np.array([place(s, n) for n in range(s["shape"][0])], float)[k[:, 0]]
    return (at + x * across * i + y * down * j) * [-1, -1, 1], numbered(s["shape"]).reshape(-1) * slope + intercept


def found(volume):
    "The same of a volume as it was read."
    z, y, x = (a.reshape(-1) for a in np.indices(volume.shape))
    return apply_affine(volume.affine, np.column_stack([x, y, z])), volume.data.reshape(-1)


def farthest(a, b):
    "Largest distance, mm, of the voxels of one value; the values must be the same."
    (p, v), (q, w) = a, b
    assert np.array_equal(np.sort(v), np.sort(w)), "the same numbers"
    return np.linalg.norm(p[np.argsort(v)] - q[np.argsort(w)], axis=1).max()


@pytest.fixture
def tmp():
    with tempfile.TemporaryDirectory() as folder: yield Path(folder)


def fresh(tmp):
    "An empty folder, for each example."
    folder = tmp / "series"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@drawn(30)
@given(s=stacks(), canonical=st.booleans())
@example(s=dict(turn=np.eye(3), pixel=np.array([10.0, 10]), step=np.array([0, 0, 0.1]), origin=np.zeros(3), shape=(3, 2, 2), names=(0, 1, 2),
    order=(0, 1, 2), numbers="grow"), canonical=True)  # slices nearer to one another than a twentieth of a pixel
def test_a_classic_series_lies_where_its_headers_say(s, canonical, tmp):
    "Any orientation, tilt, spacing, size, order of files and of numbers; also after a way through NIfTI."
    folder = fresh(tmp)
    write_classic(folder, s)
    v = read_dicom(folder, canonical=canonical)
    assert farthest(found(v), expected(s)) < MM
    back = read_volume(write_volume(v, tmp / "v.nii"), canonical=not canonical)
    assert farthest(found(back), expected(s)) < MM


@drawn(30)
@given(s=stacks(), kind=st.sampled_from([*KINDS]), shared=st.sets(st.sampled_from(("orientation", "measures", "values"))), canonical=st.booleans())
def test_an_enhanced_file_lies_where_its_groups_say(s, kind, shared, canonical, tmp):
    "CT, MR and ophthalmic tomography, each attribute shared or frame by frame, frames in any order."
    path = fresh(tmp) / "one"
    ds, planes = enhanced(kind, s, shared)
    save(ds, planes, path)
    v = read_dicom(path, canonical=canonical)
    assert farthest(found(v), expected(s, 2, -10)) < MM
    if kind != "OPT": return
    scan, (case,) = read_oct_dicom([path]), find_oct(path.parent)
    assert np.array_equal(scan.data, read_dicom(path, canonical=False).data) and np.array_equal(case.read().data, scan.data)


@drawn(15)
@given(s=stacks((3, 8)), cuts=st.sets(st.integers(1, 7), min_size=1, max_size=3), total=st.booleans(), lost=st.integers(0, 9), data=st.data())
def test_parts_are_joined_and_a_missing_one_is_named(s, cuts, total, lost, data, tmp):
    "An Enhanced file cut anywhere, its parts named in any order, reads as the whole one; and not without one of them."
    folder, n = fresh(tmp), s["shape"][0]
    ds, planes = enhanced("CT", s, ("orientation", "values"))
    save(ds, planes, tmp / "whole")
    edges = [0, *sorted(c for c in cuts if c < n), n]
    assume(len(edges) > 2)
    names = data.draw(st.permutations(range(len(edges) - 1)))
    for i, (a, b) in enumerate(zip(edges, edges[1:])):
        part = pydicom.dcmread(tmp / "whole")
        part.PerFrameFunctionalGroupsSequence = part.PerFrameFunctionalGroupsSequence[a:b]
        part.NumberOfFrames, part.SOPInstanceUID = b - a, f"1.2.9.{i}"
        part.ConcatenationUID, part.InConcatenationNumber, part.ConcatenationFrameOffsetNumber = "1.2.5", i + 1, a
        if total: part.InConcatenationTotalNumber = len(edges) - 1
        save(part, planes[a:b], folder / f"part{names[i]}")
    v = read_dicom(folder, canonical=False)
    assert farthest(found(v), expected(s, 2, -10)) < MM
    assert any("none says how many" in t for t in v.notes) is not total
    gone = lost % (len(edges) - 1)
    if not total and gone == len(edges) - 2: return  # nothing says that there was one more
    (folder / f"part{names[gone]}").unlink()
    with pytest.raises(UserError, match=f"part {gone + 1} of the {len(edges) - 1} of a concatenation is missing"): read_dicom(folder)


def test_oct_frames_without_a_place_are_joined_too(tmp):
    "Parts of an ophthalmic file whose frames have no position: in their order, by the reader of OCT."
    names = dict(zip(range(3), "cab"))
    for i in range(3):
        ds = head(KINDS["OPT"], 2, Modality="OPT", InstanceNumber=1, ConcatenationUID="1.2.5", InConcatenationNumber=i + 1,
            ConcatenationFrameOffsetNumber=2 * i, InConcatenationTotalNumber=3)
        save(ds, numbered((6, 4, 5))[2 * i:2 * i + 2], tmp / names[i])
    case, = find_oct(tmp)
    assert np.array_equal(case.read().data, numbered((6, 4, 5)))
    (tmp / names[1]).unlink()
    with pytest.raises(UserError, match="part 2 of the 3"): find_oct(tmp)[0].read()


@drawn(12)
@given(a=stacks((2, 4)), b=stacks((2, 4)), ids=st.sampled_from((("A", "B"), ("2", "1"), (None, None))), files=st.booleans())
def test_each_of_several_stacks_is_offered_and_read(a, b, ids, files, tmp):
    "By StackID, or cut in two ways; in one file each, or a classic series with a localizer in it."
    folder = fresh(tmp)
    b = b | dict(shape=(b["shape"][0], b["shape"][1] + 4, b["shape"][2]))  # other rows, where nothing else differs
    if files and ids[0] is None:
        write_classic(folder, a | dict(numbers="none"))
        for p in folder.iterdir(): p.rename(folder / f"a{p.name}")
        write_classic(folder, b | dict(numbers="none"))
        names, scale = ("2", "1"), (1, 0)
    else:
        for name, s, stack in (("a", a, ids[0]), ("b", b, ids[1])):
            ds, planes = enhanced("MR", s, ("orientation", "measures", "values"), stack)
            save(ds, planes, folder / name)
        names, scale = (("1", "2") if ids[0] is None else ids), (2, -10)
    with pytest.raises(UserError, match=r"it holds 2 stacks; choose one by its name") as e: read_dicom(folder)
    assert all(f"\n  {n}: " in str(e.value) for n in names)
    for name, s in zip(names, (a, b)):
        v = read_dicom(folder, stack=name)
        assert farthest(found(v), expected(s, *scale)) < MM and any(f"stack {name}: " in n for n in v.notes)
    with pytest.raises(UserError, match="has no stack 'other'"): read_dicom(folder, stack="other")


def linear(s, shape, slope=0.01):
    "A linear function of the place, as stored integers; its coefficients."
    x = np.random.default_rng(0).uniform(-1, 1, 3) / max(np.abs(s["step"]).max(), *s["pixel"])
    at = expected(s | dict(shape=shape))[0] - apply_affine(LPS, s["origin"])
    return np.rint(at @ x / slope).reshape(shape).astype(np.int16), lambda p: (p - apply_affine(LPS, s["origin"])) @ x


@drawn(20)
@given(s=stacks((2, 5)))
def test_upright_is_right_angled_and_linear_where_it_was_seen(s, tmp):
    "What is linear in the patient is so on the upright grid, to the steps in which it is stored; what is filled is told."
    folder = fresh(tmp)
    stored, f = linear(s, s["shape"])
    write_classic(folder, s, stored, 0.01)
    v = read_dicom(folder, upright=True, fill=-999, canonical=False)
    axes = v.affine[:3, :3] / np.linalg.norm(v.affine[:3, :3], axis=0)
    assert np.abs(axes.T @ axes - np.eye(3)).max() < 1e-6, "at right angles"
    p, values = found(v)
    seen = values != -999
    assert np.abs(values - f(p))[seen].max() < 0.0101 and v.shape[0] == s["shape"][0]
    told = [n for n in v.notes if "no slice measured" in n]
    assert (len(told) == 1 and told[0].startswith(f"{(~seen).sum():,} voxels")) if (~seen).any() else not told
    corners = expected(s)[0]
    inside = apply_affine(np.linalg.inv(v.affine), corners)
    assert (inside > -1e-4).all() and (inside < np.array(v.shape[::-1]) - 1 + 1e-4).all(), "nothing is cut off"


@drawn(20)
@given(s=stacks((4, 8)), gaps=st.lists(st.floats(0.6, 3), min_size=3, max_size=7), wanted=st.one_of(st.just(True), st.floats(0.3, 1.5)))
def test_even_places_are_linear_and_what_was_invented_is_told(s, gaps, wanted, tmp):
    "Slices at any distances; the note counts those that were not acquired."
    folder, along = fresh(tmp), np.cumsum([0, *gaps])
    s, stored = s | dict(shape=(len(along), *s["shape"][1:])), []
    s |= dict(names=range(len(along)), order=range(len(along)))
    size = abs(s["step"] @ s["turn"][:, 2])
    each = [s | dict(origin=s["origin"] + a * s["step"]) for a in along]
    _, f = linear(s, s["shape"])
    for k, one in enumerate(each):
        p = expected(one | dict(shape=(1, *s["shape"][1:])))[0]
        stored.append(np.rint(f(p) / 0.01).reshape(s["shape"][1:]).astype(np.int16))
        save(head(CTImageStorage, ImagePositionPatient=place(one, 0), ImageOrientationPatient=orientation(s), PixelSpacing=number(s["pixel"][::-1]),
            SliceThickness=number([size])[0], RescaleSlope="0.01", RescaleIntercept="0", InstanceNumber=k + 1), stored[-1], folder / f"IM{k:02}")
    asked = wanted if wanted is True else wanted * size * float(np.median(gaps))
    try: v = read_dicom(folder, regular=asked, canonical=False)
    except UserError as e:
        assert "above 0 and at most" in str(e) and asked > size * along[-1]
        return
    p, values = found(v)
    moved = 0.1 * v.spacing[0] if not any("interpolated" in n for n in v.notes) else 0
    near = [n for n in v.notes if "from even spacing" in n]
    if not near and not moved: assert np.abs(values - f(p)).max() < 0.0101 or _snapped(v, along * size, values, stored)
    told = [n for n in v.notes if "slices were not acquired" in n]
    if told: assert 0 < int(told[0].split(" of its ")[0]) <= v.shape[0] and f"of its {v.shape[0]} slices" in told[0]


def _snapped(v, at, values, stored):
    "Whether acquired slices that lie near even places were taken for them: then they are there to the bit."
    planes = values.reshape(v.shape)
    return sum(any(np.allclose(p, 0.01 * q, atol=1e-5) for p in planes) for q in stored) == len(at)


def by_quaternion(h):
    "Index → mm by a header's qform, as nifti1_io.c reads it: a turn of almost 180° is taken for one of 180°."
    b, c, d = q = np.array([float(h[f"quatern_{k}"]) for k in "bcd"])
    if (rest := 1 - q @ q) < 1e-7: b, c, d = q / np.linalg.norm(q)
    a = 0 if rest < 1e-7 else np.sqrt(rest)
    turn = np.array([[a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
                     [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
                     [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c]])
    sign = -1 if h["pixdim"][0] == -1 else 1
    return nib.affines.from_matvec(turn * (h["pixdim"][1:4] * [1, 1, sign]).astype(float), [float(h[f"qoffset_{k}"]) for k in "xyz"])


@drawn(40)
@given(turn=rotations(), size=st.tuples(sizes, sizes, sizes), origin=st.tuples(*[st.floats(-500, 500)] * 3), flip=st.booleans(),
    form=st.sampled_from(("sform", "qform", "both", "two")), shear=st.floats(-0.5, 0.5), shape=st.tuples(*[st.integers(2, 5)] * 3),
    canonical=st.booleans(), packed=st.booleans())
def test_nifti_lies_where_its_forms_say_and_goes_back_to_the_bit(turn, size, origin, flip, form, shear, shape, canonical, packed, tmp):
    "A sform with a shear, a qform, both, or two that differ; read, written, and read again."
    right = nib.affines.from_matvec(turn * np.array(size) * (1, 1, -1 if flip else 1), origin)
    lean = right.copy()
    lean[:3, 2] += shear * right[:3, 1]
    data = numbered(shape).astype(np.int16)
    image = nib.Nifti1Image(data, right)
    image.set_qform(right, 0 if form == "sform" else 1)
    image.set_sform(lean if form in ("sform", "two") else right, 0 if form == "qform" else 1)
    path = tmp / ("v.nii.gz" if packed else "v.nii")
    image.to_filename(path)
    h = nib.load(path).header
    affine = by_quaternion(h) if form == "qform" else np.vstack([h["srow_x"], h["srow_y"], h["srow_z"], [0, 0, 0, 1]]).astype(float)
    at = apply_affine(affine, np.stack(np.indices(shape), -1).reshape(-1, 3)), data.reshape(-1)
    v = read_volume(path, canonical=canonical)
    assert farthest(found(v), at) < MM
    back = nib.load(write_volume(v, tmp / "back.nii.gz"))
    assert np.array_equal(back.affine, nib.load(path).affine) and np.array_equal(np.asarray(back.dataobj), data)
    assert farthest(found(read_volume(tmp / "back.nii.gz", canonical=not canonical)), at) < MM


@drawn(20)
@given(turn=rotations(), size=st.tuples(sizes, sizes, sizes), origin=st.tuples(*[st.floats(-500, 500)] * 3), shear=st.floats(-0.5, 0.5),
    shape=st.tuples(*[st.integers(2, 5)] * 3), canonical=st.booleans())
def test_a_volume_of_ones_own_comes_back(turn, size, origin, shear, shape, canonical, tmp):
    "Born in memory, with any affine, also a sheared one."
    affine = nib.affines.from_matvec(turn * np.array(size), origin)
    affine[:3, 2] += shear * affine[:3, 0]
    v = Volume(numbered(shape), affine)
    assert farthest(found(read_volume(write_volume(v, tmp / "v.nii"), canonical)), found(v)) < MM


@drawn(5)
@given(s=stacks((2, 5)), canonical=st.booleans())
def test_a_derived_series_and_a_segmentation_lie_on_their_source(s, canonical, tmp):
    "Written by highdicom, of a series that lies anyhow, and read by medlab, by highdicom and by the standard's equation."
    assume(s["shape"][1] * s["shape"][2] >= 8)  # smaller slices are refused
    hd, folder = pytest.importorskip("highdicom"), fresh(tmp)
    from medlab.archive.segments import LABEL, write_segments
    from medlab.slices.series import write_series
    write_classic(folder, s)
    v = read_dicom(folder, canonical=canonical)
    derived = write_series(read_dicom(folder, canonical=False), folder / "thin", folder)  # its slices are data[k]
    assert farthest(found(read_dicom(derived.folder)), expected(s)) < MM
    ids = np.array([0, 3, 7])
    labels = Volume(ids[v.data.astype(int) % 3].astype(np.uint8), v.affine, "labels", v.grid)
    ds = pydicom.dcmread(write_segments(labels, tmp / "labels.dcm", folder, {3: "three"}).path)
    (p, value), got = expected(s), []
    shared = ds.SharedFunctionalGroupsSequence[0]
    x, y = np.array(shared.PlaneOrientationSequence[0].ImageOrientationPatient, float).reshape(2, 3)
    down, across = map(float, shared.PixelMeasuresSequence[0].PixelSpacing)
    id_of = {g.SegmentNumber: int(g.TrackingID.removeprefix(LABEL)) for g in ds.SegmentSequence}
    bits = np.unpackbits(np.frombuffer(ds.PixelData, np.uint8), bitorder="little")  # of all frames in a row (PS3.5 8.1.1)
    frames = bits[:len(ds.PerFrameFunctionalGroupsSequence) * ds.Rows * ds.Columns].reshape(-1, ds.Rows, ds.Columns)
    for bits, f in zip(frames, ds.PerFrameFunctionalGroupsSequence):
        j, i = np.nonzero(bits)
        at = np.array(f.PlanePositionSequence[0].ImagePositionPatient, float) + np.outer(i, x * across) + np.outer(j, y * down)
        which = id_of[f.SegmentIdentificationSequence[0].ReferencedSegmentNumber]
        got += [(which, *place) for place in at * [-1, -1, 1]]
    got, wanted = np.array(got), np.column_stack([ids[value.astype(int) % 3], p])[value.astype(int) % 3 > 0]
    assert len(got) == len(wanted)
    for row in got: assert np.abs(wanted[wanted[:, 0] == row[0], 1:] - row[1:]).max(1).min() < MM
    assert hd.seg.segread(tmp / "labels.dcm").number_of_segments == 2


def tilted_series(folder, n=12):
    "A tilted series of noise, and how it lies."
    s = dict(turn=np.eye(3), pixel=np.array([0.8, 0.8]), step=np.array([0, 0.7, 3.0]), origin=np.array([1.0, -20, 300]), shape=(n, 20, 24),
        names=range(n), order=range(n), numbers="grow")
    write_classic(folder, s, np.random.default_rng(0).integers(-900, 900, s["shape"]).astype(np.int16))
    return s


def test_how_a_series_is_read_travels_with_its_case(tmp):
    "From the field of a recipe to the worker that reads, and into the name of what is kept of it."
    tilted_series(tmp / "scan")
    upright = DicomOptions.of("upright")
    kept, up = read_dicom(tmp / "scan"), read_dicom(tmp / "scan", upright=True)
    assert up.shape != kept.shape
    case, = find_slices(tmp / "scan", lone="thin", dicom=upright)
    assert pickle.loads(pickle.dumps(case)).read("thin")["thin"].shape == up.shape
    assert content_of(case) != content_of(replace(case, dicom=DicomOptions())) == content_of(find_slices(tmp / "scan")[0])
    labelled, = find_labelled(tmp / "scan", upright).cases
    assert labelled.read()["images"][0].shape == up.shape and find_labelled(tmp / "scan").cases[0].read()["images"][0].shape == kept.shape
    scan, = find_oct(tmp / "scan", upright)
    assert scan.read().data.shape == read_dicom(tmp / "scan", upright=True, canonical=False).shape
    for cls in (recipes.Segmentation, recipes.SliceInterpolation, recipes.VJEPA3D, recipes.Codec):
        with pytest.raises(UserError, match="did you mean 'upright'"): cls(dicom="uprigt")
        assert cls(dicom="upright, stack=2").config()["dicom"] == "upright, stack=2"
    found, = recipes.SliceInterpolation(dicom="upright").find(tmp / "scan")
    assert found.dicom == DicomOptions(upright=True, fill=FILL)


def test_a_tilted_series_is_refused_and_read_upright_for_slices(tmp):
    "The thin slices of an upright stack go back as a series that lies on its source, read as it was."
    pytest.importorskip("highdicom")
    from medlab.slices.series import write_series
    tilted_series(tmp / "scan")
    case, = find_slices(tmp / "scan", lone="thick")
    with pytest.raises(UserError, match=r"sheared by 13.1.*--dicom upright"): load_slices(case, 5, for_prediction=True, hu=False)
    upright = DicomOptions(upright=True)
    case, = find_slices(tmp / "scan", lone="thick", dicom=upright)
    loaded = load_slices(case, 5, for_prediction=True, hu=False)
    assert np.array_equal(loaded.valid, (loaded.thick != FILL).repeat(5, 0)) and not loaded.valid.all(), "unseen is not measured"
    thin = replace(loaded.like, data=np.repeat(loaded.thick, 5, 0), name="thin")
    made = write_series(thin, tmp / "thin", tmp / "scan", dicom=upright)
    back = read_dicom(made.folder)
    assert back.shape[0] == 60 and np.isclose(back.spacing[0], 0.6) and not any("sheared" in n for n in back.notes)
    with pytest.raises(UserError, match="out of the series"): write_series(thin, tmp / "no", tmp / "scan")


def test_how_dicom_is_read_is_chosen_anew_where_a_model_is_used(tmp):
    "A folder of a tilted series, of one of two stacks and of a plain one: --dicom for all of them, and each says what it made of it."
    series = lambda step, n, size=(20, 24): dict(turn=np.eye(3), pixel=np.array([0.8, 0.8]), step=np.array(step), origin=np.array([1.0, -20, 300]), shape=(n, *size),
        names=range(n), order=range(n), numbers="grow")
    values = lambda s: np.random.default_rng(0).integers(-900, 900, s["shape"]).astype(np.int16)
    for name, step in (("tilted", (0, 0.7, 3.0)), ("plain", (0, 0, 3.0))): write_classic(tmp / "scans" / name, s := series(step, 12), values(s))
    two = write_classic(tmp / "scans/two", s := series((0, 0, 3.0), 10), values(s))
    for ds in write_classic(tmp / "more", s := series((0, 0, 3.0), 12, (18, 24)), values(s)):
        ds.SeriesInstanceUID = two[0].SeriesInstanceUID
        ds.save_as(tmp / "scans/two" / f"more{ds.InstanceNumber}-{ds.ImagePositionPatient[2]}.dcm", enforce_file_format=True)
    recipe = recipes.Segmentation(image_size=(16, 16, 16), filters=(4, 8, 8), phantoms=4, dicom="upright")
    with Trainer(recipe, tmp / "run", threads=1) as t: t.fit(1, progress=False)
    status, out, err = said("predict", tmp / "run", tmp / "scans/two", tmp / "no.nii.gz")
    assert status == 2 and "choose one by its name, such as stack='1' (--dicom stack=1)" in err, err
    (tmp / "scans.csv").write_text("image,label\n" + "".join(f"scans/{n},none.nii.gz\n" for n in ("tilted", "plain", "two")))
    status, out, err = said("predict", tmp / "run", tmp / "scans.csv", tmp / "out", "--dicom", "stack=2")
    assert status == 0 and {f.name for f in (tmp / "out").iterdir()} == {f"{n}-labels.nii.gz" for n in ("tilted", "plain", "two")}, (out, err)
    assert read_volume(tmp / "out/two-labels.nii.gz").shape[0] == 12 and "medlab: two: stack 2: 10 images of other stacks" in err
    assert all(f"medlab: {n}: stack=2 was not needed: this series is one stack" in err for n in ("plain", "tilted"))
    assert "medlab: tilted: the stack is sheared by 13.1° (gantry tilt); the affine keeps it" in err, "no word of it was said before"
    assert "sheared" not in "".join(line for line in err.splitlines() if "plain" in line)
    status, out, err = said("predict", tmp / "run", tmp / "scans/tilted", tmp / "up.nii.gz")
    assert status == 0 and "was made upright" in err and "hold" in err, "as the run was trained"
    for command in ("predict", "evaluate", "embed", "probe"):
        status, out, err = said(command, tmp / "run", *([tmp / "scans"] if command != "probe" else []), *dict(predict=["x"], embed=["x.npz"]).get(command, []), "--dicom", "uprigt")
        assert status == 2 and ("did you mean" in err or "gives no features" in err), (command, err)
    with Trainer(recipes.FastDDPM(**recipes.FastDDPM.tiny), tmp / "ddpm", threads=1) as t: t.fit(1, progress=False)
    status, out, err = said("evaluate", tmp / "ddpm", "--dicom", "upright")
    assert status == 2 and "FastDDPM reads no DICOM series" in err and "leave --dicom out" in err, err


@pytest.mark.parametrize("kind", ["CT", "MR"])
def test_enhanced_files_of_another_writer(kind, tmp):
    "highdicom turns a classic series into a legacy converted Enhanced one, which reads the same."
    hd = pytest.importorskip("highdicom")
    turn = np.linalg.qr(np.random.default_rng(3).standard_normal((3, 3)))[0]
    turn *= (1, 1, np.linalg.det(turn))
    s = dict(turn=turn, pixel=np.array([0.7, 0.9]), step=turn @ (0.2, 0, 2.5), origin=np.array([1.0, -20, 300]), shape=(5, 6, 7),
        names=(3, 1, 4, 0, 2), order=(0, 1, 2, 3, 4), numbers="grow")
    headers = write_classic(tmp / "classic", s, slope=0.5)
    for ds in headers:
        ds.Modality, ds.SOPClassUID = kind, pydicom.uid.UID(dict(CT="1.2.840.10008.5.1.4.1.1.2", MR="1.2.840.10008.5.1.4.1.1.4")[kind])
        ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID
        for name in "PatientBirthDate PatientSex AccessionNumber StudyID StudyDate StudyTime ReferringPhysicianName Manufacturer".split(): setattr(ds, name, "")
        ds.ImageType, ds.InstanceNumber, ds.RescaleType = ["ORIGINAL", "PRIMARY", "AXIAL"], int(ds.InstanceNumber), "HU"
    made = getattr(hd.legacy, f"LegacyConvertedEnhanced{kind}Image")(headers, hd.UID(), 2, hd.UID(), 1)
    made.save_as(tmp / "enhanced.dcm")
    v = read_dicom(tmp / "enhanced.dcm")
    assert farthest(found(v), expected(s, 0.5)) < MM and np.array_equal(v.data, read_dicom(tmp / "classic").data)


real = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set MEDLAB_DATA)")
READ = {"lidc0001_2p5mm_16slices": {}, "phantom_head_5mm_noext": {}, "ct_j2k_overlap_noext": {}, "mr_enhanced_multiframe_canon_dti": dict(frame=7),
    **{f"noise_pixels_geometry_only/{n}": {} for n in ("ct_gantry_tilt_4slices", "mr_compressed_j2k", "mr_compressed_jpeg",
        "mr_compressed_jpegls", "mr_compressed_rle", "mr_nonsquare_pixels")},
    "noise_pixels_geometry_only/ct_missing_slice_0p75mm": dict(regular=True)}
REFUSED = {"mr_rgb_j2k": "holds colours", "noise_pixels_geometry_only/ct_same_position_not_a_volume": "4 images at each of 1 position"}


@real
@pytest.mark.parametrize("name", [*READ])
def test_real_series_lie_where_simpleitk_says(name):
    "Every slice at its place: the corners of its first, a middle and its last slice by GDCM's reading of that file alone."
    sitk, v = pytest.importorskip("SimpleITK"), read_dicom(DATA / name, **READ[name])
    back, files = np.linalg.inv(v.affine), [p for p in sorted((DATA / name).iterdir())]
    if len(files) == 1: return _frames_lie(v, files[0], READ[name]["frame"])
    for p in files:
        one = sitk.ReadImage(str(p), imageIO="GDCMImageIO")
        stored = sitk.GetArrayFromImage(one)[0]
        for i, j in ((0, 0), (one.GetWidth() - 1, 0), (0, one.GetHeight() - 1), (one.GetWidth() // 2, one.GetHeight() // 2)):
            at = apply_affine(back, np.array(one.TransformIndexToPhysicalPoint((i, j, 0))) * [-1, -1, 1])
            index = np.rint(at).astype(int)
            assert np.abs((at - index) * v.spacing[::-1]).max() < MM, p.name
            assert np.isclose(v.data[tuple(index[::-1])], stored[j, i], rtol=1e-5, atol=1e-3)


def _frames_lie(v, file, frame):
    "The frames of an Enhanced file, by the standard's equation."
    ds, back = pydicom.dcmread(file), np.linalg.inv(v.affine)
    x, y = np.array(ds.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0].ImageOrientationPatient, float).reshape(2, 3)
    for k in range(40 * frame, 40 * frame + 40):
        at = np.array(ds.PerFrameFunctionalGroupsSequence[k].PlanePositionSequence[0].ImagePositionPatient, float)
        for i, j in ((0, 0), (79, 79), (40, 3)):
            index = apply_affine(back, (at + 3 * i * x + 3 * j * y) * [-1, -1, 1])
            assert np.abs(index - np.rint(index)).max() * 3 < MM
            assert v.data[tuple(np.rint(index).astype(int)[::-1])] == ds.pixel_array[k, j, i]


@real
@pytest.mark.parametrize("name", [*REFUSED])
def test_real_series_that_are_none_are_refused(name):
    with pytest.raises(UserError, match=REFUSED[name]): read_dicom(DATA / name)


@real
def test_a_real_tilted_series_stands_upright():
    "Four slices at 14°: three axes at right angles, and what was measured is all there."
    folder = DATA / "noise_pixels_geometry_only/ct_gantry_tilt_4slices"
    v, kept = read_dicom(folder, upright=True, canonical=False), read_dicom(folder, canonical=False)
    axes = v.affine[:3, :3] / v.spacing[::-1]
    assert np.abs(axes.T @ axes - np.eye(3)).max() < 1e-5 and "sheared by 14.0°" in v.notes[0] and "made upright" in v.notes[0]
    rows = np.flatnonzero((v.data[0] == kept.data[0, 0]).all(1)) if v.shape[2] == kept.shape[2] else []
    assert len(rows) and np.array_equal(v.data[0, rows[0]:rows[0] + 512], kept.data[0]), "the first slice is as it was"


@real
def test_a_real_series_with_a_gap_is_filled():
    "The slice that is missing is the mean of its neighbours, and is named."
    folder = DATA / "noise_pixels_geometry_only/ct_missing_slice_0p75mm"
    with pytest.raises(UserError, match="copy the missing slices at .* or have them interpolated: regular=True"): read_dicom(folder)
    v = read_dicom(folder, regular=True, canonical=False)
    assert v.shape[0] == 5 and "1 of its 5 slices were not acquired" in v.notes[0]
    assert np.isclose(abs(np.linalg.det(v.affine[:3, :3])) / (v.spacing[1] * v.spacing[2]), 0.75, atol=1e-3), "along the normal"
    assert np.allclose(v.data[3], (v.data[2] + v.data[4]) / 2, atol=1e-2) or np.allclose(v.data[1], (v.data[0] + v.data[2]) / 2, atol=1e-2)
