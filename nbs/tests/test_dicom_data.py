"""Every series of the real data is read at the right place, held against SimpleITK, or refused with a sentence that says what to do."""
import itertools
import os
from pathlib import Path

import numpy as np
import pydicom
import pytest

from medlab.core import UserError
from medlab.data.dicom import read_dicom

DATA = Path(os.environ.get("MEDLAB_DATA", Path(__file__).resolve().parents[3] / "shared/data")) / "dicom"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set MEDLAB_DATA)")
REFUSED = {"mr_rgb_j2k": "read the series of grey images", "mr_enhanced_multiframe_canon_dti": "give one, frame=0 to frame=12",
    "ct_missing_slice_0p75mm": "copy the missing slice", "ct_same_position_not_a_volume": "give one, frame=0 to frame=3"}
TILTED = {"ct_gantry_tilt_4slices"}  # SimpleITK's images cannot be sheared: each of its slices is compared alone


def folders(): return sorted({p.parent for p in DATA.rglob("*") if p.is_file()}) if DATA.is_dir() else []


def corners(shape): return np.array([[*c, 1.0] for c in itertools.product(*((0, n - 1) for n in shape))])


def compared(folder, shift=0.0):
    "Greatest distance, mm, between the corners of a series as SimpleITK and as we place them, and greatest difference of a value."
    sitk = pytest.importorskip("SimpleITK")
    v = read_dicom(folder, canonical=False)
    names = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder))
    ours, shape = v.affine + np.eye(4)[:, 2:3] @ [[0, 0, 0, shift]], v.data.shape[::-1]
    groups = [[n] for n in names] if folder.name in TILTED else [names]
    apart = off = 0.0
    for names in groups:
        image = sitk.ReadImage(names if len(names) > 1 else names[0], sitk.sitkFloat64)
        theirs = np.eye(4)
        theirs[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
        theirs[:3, 3] = image.GetOrigin()
        theirs = np.diag([-1.0, -1, 1, 1]) @ theirs
        n = image.GetSize()
        first = np.linalg.solve(ours, theirs @ [0, 0, 0, 1])  # our index of their first voxel
        k = int(round(first[2]))
        step = int(np.sign((theirs[:3, 2] @ ours[:3, 2]))) or 1
        at = corners(n)
        mine = at * [1, 1, step, 1] + [0, 0, k, 0]
        apart = max(apart, np.linalg.norm((at @ theirs.T - mine @ ours.T)[:, :3], axis=1).max())
        values = sitk.GetArrayFromImage(image)
        held = v.data[k:k + step * n[2] if k + step * n[2] >= 0 else None:step]
        off = max(off, np.abs(held - values).max())
        assert held.shape == values.shape and shape[:2] == n[:2]
    return apart, off


@pytest.mark.parametrize("folder", folders(), ids=lambda f: f.name)
def test_a_series_is_placed_right_or_refused_with_what_to_do(folder, record_property):
    "Corners within 1e-3 mm of SimpleITK's, the same values; or a sentence that names the file, the fault and the remedy."
    try: read_dicom(folder)
    except UserError as e:
        assert folder.name in REFUSED, e
        assert REFUSED[folder.name] in str(e) and str(folder) in str(e)
        return
    assert folder.name not in REFUSED
    apart, off = compared(folder)
    assert apart < 1e-3 and off < 1e-3 * max(1, np.abs(read_dicom(folder).data).max() * 1e-3)


def test_the_comparison_sees_two_micrometres():
    "Planted: a series that lies aside."
    assert compared(DATA / "lidc0001_2p5mm_16slices", 0.002)[0] > 1e-3


def test_there_is_something_to_compare():
    "All the folders that the data's list names are looked at."
    assert len(folders()) >= 12 and all(any(pydicom.misc.is_dicom(p) for p in f.iterdir()) for f in folders())
