"""Damaged and hostile files, the same for the same seed: what a disk, a network or an enemy makes of sound ones.

A kind is a function that writes one thing into a folder. It gives the path, and what must become of it: "read" with
the numbers of the sound file, "refuse", or "either" where no reader could know (a bit of a voxel that is not protected
by a checksum). `make(seed, folder)` draws a format and a kind.
"""
import functools
import gzip
import io
import json
import os
import pickle
import random
import socket
import sqlite3
import struct
import tempfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import gdcm
import nibabel as nib
import numpy as np
import pydicom
import tifffile
import torch
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (CTImageStorage, DeflatedExplicitVRLittleEndian, EnhancedCTImageStorage, ExplicitVRLittleEndian,
                         ImplicitVRLittleEndian, JPEG2000Lossless, JPEGLosslessSV1, JPEGLSLossless, RLELossless)

PACKED = {RLELossless: gdcm.TransferSyntax.RLELossless, JPEG2000Lossless: gdcm.TransferSyntax.JPEG2000Lossless,
          JPEGLosslessSV1: gdcm.TransferSyntax.JPEGLosslessProcess14_1, JPEGLSLossless: gdcm.TransferSyntax.JPEGLSLossless}
SYNTAXES = {RLELossless: "RLE", JPEG2000Lossless: "JPEG 2000", JPEGLosslessSV1: "JPEG lossless", JPEGLSLossless: "JPEG-LS",
            ExplicitVRLittleEndian: "explicit", ImplicitVRLittleEndian: "implicit", DeflatedExplicitVRLittleEndian: "deflated"}
GB, SHAPE = 2**30, (9, 12, 16)  # (z, y, x) of the sound volume


@dataclass
class Made:
    "A thing to be read."
    format:str  # how it is read, see `reading.READERS`
    kind:str  # what is wrong with it
    path:Path
    must:str = "either"  # "read", "refuse" or "either"


def volume(rng):
    "The sound volume: whole numbers, so that every format keeps them."
    return np.random.default_rng(rng.randrange(2**32)).integers(-1000, 1000, SHAPE).astype(np.int16)


def truth(path): return Path(str(path) + ".truth.npy")


# bytes

def cut(rng, b): return b[:rng.randrange(len(b))]
def flip(rng, b):
    b = bytearray(b)
    for _ in range(rng.choice((1, 3, 30))): b[rng.randrange(len(b))] ^= 1 << rng.randrange(8)
    return bytes(b)
def head_flip(rng, b):
    b = bytearray(b)
    for _ in range(rng.choice((1, 4, 16))): b[rng.randrange(min(len(b), 400))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return bytes(b)
def block(rng, b):
    i, n = rng.randrange(len(b)), rng.choice((4, 64, 512))
    fill = rng.choice((b"\0" * n, b"\xff" * n, rng.randbytes(n)))
    return b[:i] + fill + b[i + n:]
def doubled(rng, b):
    i, j = sorted((rng.randrange(len(b)), rng.randrange(len(b))))
    return b[:j] + b[i:j] + b[j:]
def lost(rng, b):
    i = rng.randrange(len(b))
    return b[:i] + b[i + rng.choice((1, 2, 7, 100)):]
def nothing(rng, b): return b""
def a_byte(rng, b): return b[:1]
def noise(rng, b): return rng.randbytes(rng.choice((4, 133, 5000)))
def text(rng, b): return b"<html><body>404 Not Found</body></html>"
def pointer(rng, b): return b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"

BYTES = dict(cut=cut, flip=flip, head_flip=head_flip, block=block, doubled=doubled, lost=lost, nothing=nothing,
             a_byte=a_byte, noise=noise, text=text, pointer=pointer)
NEVER = {"nothing", "a_byte", "noise", "text", "pointer"}  # is no image any more


def not_regular(rng, folder, name):
    "A path where no ordinary file lies, by one of the ways there are."
    path, how = folder / name, rng.choice(("fifo", "socket", "zero", "loop", "folder", "dangling", "tty"))
    if how == "fifo": os.mkfifo(path)
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            here = os.getcwd()
            os.chdir(folder)  # the path of a socket has at most 107 bytes
            try: s.bind(name)
            finally: os.chdir(here)
    elif how == "zero": path.symlink_to("/dev/zero")
    elif how == "tty": path.symlink_to("/dev/tty")
    elif how == "loop": path.symlink_to(path)
    elif how == "dangling": path.symlink_to(folder / "gone")
    else: path.mkdir()
    return path


# NIfTI

def nifti_bytes(data, cls=nib.Nifti1Image, dtype=np.int16):
    image = cls(data.T.astype(dtype), np.diag([-0.7, -0.8, 2.5, 1]))
    image.header.set_data_dtype(dtype)
    return bytearray(image.to_bytes())


EXTREMES = dict(h=(0, -1, 1, 32767, -32768, 2, 7), f=(0.0, -1.0, float("nan"), float("inf"), 1e38, -1e38, 1e-40, 0.5),
                i=(0, -1, 2**31 - 1, -2**31, 348, 540), B=(0, 255, 1, 10))
FIELDS = [("i", 0)] + [("h", 40 + 2 * k) for k in range(8)] + [("h", 68), ("h", 70), ("h", 72), ("h", 74)] + [
    ("f", 76 + 4 * k) for k in range(8)] + [("f", o) for o in (108, 112, 116, 124, 128)] + [("B", 123), ("h", 252),
    ("h", 254)] + [("f", 256 + 4 * k) for k in range(18)] + [("i", 344)]


def nifti_field(rng, data):
    b = nifti_bytes(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        kind, at = rng.choice(FIELDS)
        struct.pack_into("<" + kind, b, at, rng.choice(EXTREMES[kind]))
    return bytes(b)


def nifti_huge(rng, data):
    "A header that promises far more than is there."
    b = nifti_bytes(data)
    struct.pack_into("<8h", b, 40, *rng.choice(((3, 32767, 32767, 32767, 1, 1, 1, 1), (3, 2048, 2048, 2048, 1, 1, 1, 1),
                                                 (7, 999, 999, 99, 99, 1, 1, 1), (3, 1, 1, 32767, 1, 1, 1, 1))))
    return bytes(b)


def nifti_sound(rng, data):
    return bytes(nifti_bytes(data, rng.choice((nib.Nifti1Image, nib.Nifti2Image)), rng.choice((np.int16, np.float32, np.int32))))


def nifti_type(rng, data):
    "Colours, complex numbers, NaN, extended floats."
    dtype = rng.choice((np.complex64, np.complex128, np.float32))
    a = data.astype(dtype)
    if dtype == np.float32: a[tuple(rng.randrange(n) for n in SHAPE)] = rng.choice((np.nan, np.inf))
    return bytes(nifti_bytes(a, dtype=dtype))


def deflated(head, zeros, tail=b""):
    "A raw deflate stream of a beginning, zeros, and an end; a piece of zeros is packed once and repeated."
    made = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    start = made.compress(head) + made.flush(zlib.Z_FULL_FLUSH)
    piece = made.compress(bytes(2**24)) + made.flush(zlib.Z_FULL_FLUSH)
    return start + piece * (zeros >> 24) + made.compress(tail) + made.flush()


def nifti_bomb(rng, data):
    "Zeros without end behind, or in place of, what the header promises: 4 MB become 4 GB."
    head = nifti_bytes(data)
    if rng.random() < 0.5: struct.pack_into("<4h", head, 40, 3, 1290, 1290, 1290)
    return gzip.compress(b"")[:10] + deflated(bytes(head), 4 * GB) + bytes(8)


def _write(folder, name, raw, data=None):
    path = folder / name
    path.write_bytes(raw)
    if data is not None: np.save(truth(path), data)
    return path


def nifti(rng, folder):
    data, packed = volume(rng), rng.random() < 0.6
    name, fmt = ("case.nii.gz", "nifti.gz") if packed else ("case.nii", "nifti")
    kinds = [*BYTES, *["field"] * 8, "huge", "sound", "sound", "type", "not_regular", "tail"] + ["bomb"] * packed
    kind = rng.choice(kinds)
    if kind == "bomb" and rng.random() < 0.5: kind = "field"
    if kind == "not_regular": return Made(fmt, kind, not_regular(rng, folder, name), "refuse")
    squeeze = lambda b: gzip.compress(bytes(b), 1, mtime=0) if packed else bytes(b)
    if kind == "bomb": return Made(fmt, kind, _write(folder, name, nifti_bomb(rng, data)), "either")
    if kind in BYTES:
        raw = BYTES[kind](rng, squeeze(nifti_bytes(data)))
        must = "refuse" if kind in NEVER or kind == "cut" or packed and kind == "block" else "either"
        if kind == "block" and raw == squeeze(nifti_bytes(data)): must = "either"
        return Made(fmt, kind, _write(folder, name, raw), "either" if kind == "block" else must)
    if kind == "tail": return Made(fmt, kind, _write(folder, name, squeeze(bytes(nifti_bytes(data)) + b"\0" * 77), data), "read")
    made = dict(field=nifti_field, huge=nifti_huge, sound=nifti_sound, type=nifti_type)[kind](rng, data)
    must = dict(sound="read", type="refuse", huge="refuse").get(kind, "either")
    return Made(fmt, kind, _write(folder, name, squeeze(made), data if kind == "sound" else None), must)


# DICOM

def dicom(data, z, syntax=ExplicitVRLittleEndian, enhanced=False):
    "A CT slice; or all of them as frames."
    ds, meta = Dataset(), FileMetaDataset()
    ds.SOPClassUID = meta.MediaStorageSOPClassUID = EnhancedCTImageStorage if enhanced else CTImageStorage
    ds.SOPInstanceUID = meta.MediaStorageSOPInstanceUID = f"1.2.3.{z + 1}"
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.file_meta, ds.SeriesInstanceUID, ds.StudyInstanceUID, ds.FrameOfReferenceUID = meta, "1.2.4", "1.2.5", "1.2.6"
    ds.PatientID, ds.PatientName, ds.Modality, ds.InstanceNumber = "P01", "One^Patient", "CT", z + 1
    ds.StudyDate, ds.StudyTime = "20200101", "120000"  # gdcm writes the present where there is none
    ds.Rows, ds.Columns = SHAPE[1:]
    ds.ImageOrientationPatient, ds.PixelSpacing, ds.SliceThickness = [1, 0, 0, 0, 1, 0], [0.8, 0.7], 2.5
    ds.BitsAllocated = ds.BitsStored = 16
    ds.HighBit, ds.PixelRepresentation, ds.SamplesPerPixel = 15, 1, 1
    ds.PhotometricInterpretation, ds.RescaleSlope, ds.RescaleIntercept = "MONOCHROME2", 1, 0
    if enhanced:
        ds.NumberOfFrames = len(data)
        ds.PerFrameFunctionalGroupsSequence = [_group(k) for k in range(len(data))]
        ds.PixelData = data.tobytes()
    else: ds.ImagePositionPatient, ds.PixelData = [0, 0, 2.5 * z], data[z].tobytes()
    ds["PixelData"].VR = "OW"
    meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax in PACKED else syntax
    return ds


def _group(k):
    g, at = Dataset(), Dataset()
    at.ImagePositionPatient = [0, 0, 2.5 * k]
    g.PlanePositionSequence = [at]
    return g


def dicom_bytes(ds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pydicom.dcmwrite(out := io.BytesIO(), ds, enforce_file_format=True)
    return out.getvalue()


def packed(raw, syntax):
    "The bytes of a file with its pixels compressed."
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "a.dcm", Path(folder) / "b.dcm"
        file.write_bytes(raw)
        reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
        reader.SetFileName(str(file))
        assert reader.Read()
        change.SetTransferSyntax(gdcm.TransferSyntax(PACKED[syntax]))
        change.SetInput(reader.GetImage())
        assert change.Change()
        writer.SetFileName(str(out))
        writer.SetFile(reader.GetFile())
        writer.SetImage(change.GetOutput())
        assert writer.Write()
        return out.read_bytes()


HOSTILE = ("", "x", "1,5", "1\\2\\3\\4\\5\\6\\7", "nan", "inf", "1e308", "-1e308", "0", "-1", "99999999999999999999", "\x1b[2J",
           "<script>alert(1)</script>", "\0", "ä" * 3, "1e9999", "1 2", "--", "1\\nan\\3")
TAGS = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness", "SpacingBetweenSlices", "RescaleSlope",
        "RescaleIntercept", "InstanceNumber", "Rows", "Columns", "NumberOfFrames", "BitsAllocated", "BitsStored", "HighBit",
        "PixelRepresentation", "SamplesPerPixel", "PhotometricInterpretation", "SOPClassUID", "SeriesInstanceUID",
        "FrameOfReferenceUID", "PatientID", "Modality", "SeriesDescription", "PixelPaddingValue", "EchoTime", "SeriesNumber",
        "TemporalPositionIdentifier", "LossyImageCompression", "Manufacturer", "ImageLaterality")
NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 32, 64, 255, 65535)


def hostile_tag(rng, ds):
    "Another value for a tag, of the right kind or none, or the tag away."
    name, how = rng.choice(TAGS), rng.random()
    if how < 0.15:
        if name in ds: delattr(ds, name)
        return
    tag = pydicom.tag.Tag(name)
    vr = pydicom.datadict.dictionary_VR(tag).split(" ")[0]
    if vr == "US": raw = struct.pack("<H", rng.choice(NUMBERS)) * rng.choice((1, 1, 1, 2, 0))
    else: raw = rng.choice(HOSTILE).encode("latin-1")
    if how > 0.9: vr = rng.choice(("UN", "DS", "US", "FD", "OB", "SQ", "LO", "IS", "ZZ", "??"))
    raw += b"\0" * (len(raw) % 2)
    ds[tag] = pydicom.dataelem.RawDataElement(tag, vr, len(raw), raw, 0, False, True)


def tagged(rng, data, enhanced):
    "A file of which some tags are hostile."
    ds = dicom(data, 4, rng.choice((ExplicitVRLittleEndian, ImplicitVRLittleEndian)), enhanced)
    raw = dicom_bytes(ds)
    ds = pydicom.dcmread(io.BytesIO(raw))
    for _ in range(rng.choice((1, 1, 2, 4))): hostile_tag(rng, ds)
    try: return dicom_bytes(ds)
    except Exception: return unknown_vr(rng, raw)  # what pydicom cannot write


def unknown_vr(rng, raw):
    "A tag whose VR is none, in a file with explicit ones."
    tag = pydicom.tag.Tag(rng.choice(TAGS))
    at = raw.rfind(struct.pack("<HH", tag.group, tag.elem))
    return raw if at < 0 else raw[:at + 4] + rng.choice((b"ZZ", b"\0\0", b"??", b"UT", b"SQ")) + raw[at + 6:]


def dicom_frames(rng, data):
    "Sizes that do not fit the pixels."
    ds = dicom(data, 4, enhanced=True)
    name, value = rng.choice((("NumberOfFrames", 2**31 - 1), ("NumberOfFrames", 0), ("NumberOfFrames", -3), ("NumberOfFrames", 10),
        ("Rows", 65535), ("Columns", 65535), ("Rows", 0), ("BitsAllocated", 64), ("BitsAllocated", 12), ("SamplesPerPixel", 3)))
    setattr(ds, name, value)
    return dicom_bytes(ds)


def dicom_shared(rng, data):
    "A single group for more frames than there could be, or none."
    ds = dicom(data, 4, enhanced=True)
    ds.NumberOfFrames = rng.choice((2**31 - 1, 10**6, 65535))
    if rng.random() < 0.5: del ds.PerFrameFunctionalGroupsSequence
    ds.ImagePositionPatient = [0, 0, 0]
    return dicom_bytes(ds)


def deep(rng, data):
    "Sequences within sequences."
    ds = dicom(data, 4)
    raw, n = dicom_bytes(ds), rng.choice((50, 1000, 5000))
    start = struct.pack("<HH2sHI", 0x5200, 0x9230, b"SQ", 0, 0xFFFFFFFF) + struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF)
    return raw + start * n  # behind the pixels, as a tag of a higher number would lie


def deep_before(rng, data):
    "The same before the pixels, in a tag that a reader wants."
    raw, n = dicom_bytes(dicom(data, 4)), rng.choice((50, 1000, 5000))
    at = raw.index(struct.pack("<HH", 0x7FE0, 0x10))
    start = struct.pack("<HH2sHI", 0x5200, 0x9230, b"SQ", 0, 0xFFFFFFFF) + struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF)
    end = struct.pack("<HHI", 0xFFFE, 0xE00D, 0) + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)
    return raw[:at] + start * n + end * n + raw[at:]


def inflated(rng, data):
    "A deflated data set that inflates to a gigabyte."
    raw = dicom_bytes(dicom(data, 4, DeflatedExplicitVRLittleEndian))
    at = _meta_end(raw)
    body = zlib.decompress(raw[at:], -zlib.MAX_WBITS)
    return raw[:at] + deflated(struct.pack("<HH2sHI", 0x0009, 0x0010, b"OB", 0, GB), GB, body)


def _meta_end(raw):
    "Where the data set begins behind the file's meta information."
    return 132 + 12 + struct.unpack("<I", raw[140:144])[0]


def dicom_one(rng, folder):
    data, enhanced = volume(rng), rng.random() < 0.7
    kind = rng.choice([*BYTES, *["tags"] * 12, "frames", "frames", "shared", "deep", "deep_before", "inflated", "sound", "sound", "not_regular"])
    if kind == "inflated" and rng.random() < 0.6: kind = "tags"
    if kind == "not_regular": return Made("dicom", kind, not_regular(rng, folder, "image.dcm"), "refuse")
    if kind == "sound":
        syntax = rng.choice(sorted(SYNTAXES))
        raw = dicom_bytes(dicom(data, 4, syntax, True))
        if syntax in PACKED: raw = packed(raw, syntax)
        return Made("dicom", f"sound, {SYNTAXES[syntax]}", _write(folder, "image.dcm", raw, data), "read")
    if kind in BYTES:
        raw = BYTES[kind](rng, dicom_bytes(dicom(data, 4, enhanced=enhanced)))
        return Made("dicom", kind, _write(folder, "image.dcm", raw), "refuse" if kind in NEVER | {"cut"} else "either")
    makers = dict(frames=dicom_frames, shared=dicom_shared, deep=deep, deep_before=deep_before, inflated=inflated)
    raw = makers[kind](rng, data) if kind in makers else tagged(rng, data, enhanced)
    return Made("dicom", kind, _write(folder, "image.dcm", raw))


# packed pixels

def _element(raw):
    "Where the pieces of the pixels begin, behind the element's own length."
    return raw.rindex(struct.pack("<HH", 0x7FE0, 0x10) + b"OB\0\0\xff\xff\xff\xff") + 12


def hostile_table(rng, raw):
    "A table of offsets that points elsewhere, or is longer than the file."
    at = _element(raw)
    n = struct.unpack("<I", raw[at + 4:at + 8])[0]
    table = b"".join(struct.pack("<I", rng.choice((0, 1, 8, 2**31, 2**32 - 2, rng.randrange(5000)))) for _ in range(rng.choice((1, 9, 10, 5000))))
    return raw[:at + 4] + struct.pack("<I", rng.choice((len(table), len(table), 2**32 - 2))) + table + raw[at + 8 + n:]


def hostile_pieces(rng, raw):
    "Pieces that are longer or shorter than they are, one more, one less, or no end."
    at = _element(raw)
    at += 8 + struct.unpack("<I", raw[at + 4:at + 8])[0]
    n, how = struct.unpack("<I", raw[at + 4:at + 8])[0], rng.randrange(4)
    if how == 0: return raw[:at + 4] + struct.pack("<I", rng.choice((0, 1, n + 2, 2**31, 2**32 - 1))) + raw[at + 8:]
    if how == 1: return raw[:at + 8 + n] + raw[at:at + 8 + n] + raw[at + 8 + n:]
    if how == 2: return raw[:at] + raw[at + 8 + n:]
    return raw[:-8]


def hostile_stream(rng, raw, syntax):
    "A codestream that promises a gigapixel, or another number of bits."
    marker = {JPEG2000Lossless: b"\xff\x51", JPEGLSLossless: b"\xff\xf7", JPEGLosslessSV1: b"\xff\xc3"}.get(syntax)
    b, at = bytearray(raw), _element(raw)
    if marker is None:  # run-length: a segment's place, or its length
        at += 8 + struct.unpack("<I", raw[at + 4:at + 8])[0] + 8
        struct.pack_into("<I", b, at + 4 * rng.randrange(4), rng.choice((0, 1, 15, 64, 2**31, 2**32 - 1)))
        return bytes(b)
    at = raw.index(marker, at)
    where = at + rng.choice((6, 10, 14, 18, 22, 26, 38, 39)) if syntax == JPEG2000Lossless else at + rng.choice((4, 5, 7, 9))
    value = rng.choice((0, 1, 255, 4095, 65535)) if syntax != JPEG2000Lossless else rng.choice((0, 1, 60000, 2**31 - 1, 2**32 - 1))
    struct.pack_into(">I" if syntax == JPEG2000Lossless else ">H", b, where, value)
    return bytes(b)


def dicom_packed(rng, folder):
    "A file of packed frames, damaged where its decoder reads."
    data, syntax = volume(rng), rng.choice(sorted(PACKED))
    raw = packed(dicom_bytes(dicom(data, 4, syntax, True)), syntax)
    kind, must = rng.choice(("table", "pieces", "stream", "stream", "stream", "bytes", "bytes", "bytes", "promise", "sound")), "either"
    if kind == "sound": return Made("dicom packed", f"sound, {SYNTAXES[syntax]}", _write(folder, "image.dcm", raw, data), "read")
    if kind == "table": raw = hostile_table(rng, raw)
    elif kind == "pieces": raw = hostile_pieces(rng, raw)
    elif kind == "stream": raw = hostile_stream(rng, raw, syntax)
    elif kind == "promise":  # of a header
        ds = pydicom.dcmread(io.BytesIO(raw))
        name, value = rng.choice((("Rows", 60000), ("Columns", 65535), ("BitsAllocated", 32), ("BitsAllocated", 8), ("BitsStored", 12),
            ("NumberOfFrames", 65535), ("NumberOfFrames", 1), ("PixelRepresentation", 0), ("SamplesPerPixel", 3)))
        setattr(ds, name, value)
        raw = dicom_bytes(ds)
    else:
        at = _element(raw) + 60
        raw = raw[:at] + BYTES[rng.choice(("flip", "block", "doubled", "lost", "cut"))](rng, raw[at:])
    return Made("dicom packed", f"{kind}, {SYNTAXES[syntax]}", _write(folder, "image.dcm", raw), must)


def dicom_series(rng, folder):
    "A folder of slices, of which some are damaged."
    data, where = volume(rng), folder / "series"
    where.mkdir()
    files = {f"{z:02}.dcm": dicom(data, z) for z in range(SHAPE[0])}
    raw = {k: dicom_bytes(v) for k, v in files.items()}
    kind = rng.choice(("sound", *["tags"] * 4, "bytes", "bytes", "empty_end", "empty_middle", "far", "fifo", "copy", "others", "strange_names", "one_more_frame"))
    must, victim = "either", rng.choice(sorted(raw))
    if kind == "tags":
        ds = pydicom.dcmread(io.BytesIO(raw[victim]))
        for _ in range(rng.choice((1, 3))): hostile_tag(rng, ds)
        try: raw[victim] = dicom_bytes(ds)
        except Exception: raw[victim] = flip(rng, raw[victim])
    elif kind == "bytes": raw[victim] = BYTES[rng.choice(sorted(BYTES))](rng, raw[victim])
    elif kind.startswith("empty"): raw["08.dcm" if kind == "empty_end" else "04.dcm"], must = b"", "refuse"
    elif kind == "far":
        files[victim].ImagePositionPatient = [0, 0, rng.choice((1e308, -1e308, 1e30, 1e7))]
        raw[victim], must = dicom_bytes(files[victim]), "refuse"
    elif kind == "copy": raw["again.dcm"], must = raw[victim], "refuse"
    elif kind == "fifo": os.mkfifo(where / "pipe.dcm")
    elif kind == "one_more_frame":
        ds = pydicom.dcmread(io.BytesIO(raw[victim]))
        ds.NumberOfFrames = rng.choice((0, 2, 10**6))
        raw[victim] = dicom_bytes(ds)
    elif kind == "others": raw |= {"README.txt": b"words", "._01.dcm": b"\0" * 200, "Thumbs.db": b"\0" * 500}
    elif kind == "strange_names": raw = {f"{k}\x1b[31m \udcff\n.dcm".encode("utf-8", "surrogateescape"): v for k, v in raw.items()}
    for name, b in raw.items():
        with open(os.path.join(os.fsencode(where), os.fsencode(name)), "wb") as f: f.write(b)
    if kind in ("sound", "others", "strange_names"):
        np.save(truth(where), data)
        must = "read"
    return Made("dicom series", kind, where, must)


# images

def _image_bytes(array, suffix):
    out = io.BytesIO()
    if suffix == ".tif": tifffile.imwrite(out, array, photometric="minisblack")
    else: Image.fromarray(array if suffix == ".png" else (array >> 8).astype(np.uint8)).save(out, "png" if suffix == ".png" else "jpeg")
    return out.getvalue()


def png_chunk(name, body): return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


@functools.lru_cache(2)
def zeros(n): return zlib.compress(bytes(n), 9)


def png_huge(rng, a):
    "A header of a gigapixel, or a text that inflates without end."
    if rng.random() < 0.5:
        w, h = rng.choice(((2**31 - 1, 1), (50000, 50000), (0, 10), (12000, 12000)))
        body = zeros(50000 * 1000) if w == 50000 else zlib.compress(b"\0" * 100)
        return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 0, 0, 0, 0)) + png_chunk(
            b"IDAT", body) + png_chunk(b"IEND", b"")
    raw = _image_bytes(a, ".png")
    return raw[:33] + png_chunk(b"zTXt", b"Comment\0\0" + zeros(2**28)) + raw[33:]


def tiff_tags(rng, a):
    "Directories that point to themselves, and sizes out of reach."
    raw = bytearray(_image_bytes(a, ".tif"))
    ifd = struct.unpack("<I", raw[4:8])[0]
    n = struct.unpack("<H", raw[ifd:ifd + 2])[0]
    if rng.random() < 0.3:
        struct.pack_into("<I", raw, ifd + 2 + 12 * n, rng.choice((ifd, 4, 2**32 - 8)))
        return bytes(raw)
    for _ in range(rng.choice((1, 2))):
        at = ifd + 2 + 12 * rng.randrange(n)
        struct.pack_into("<I", raw, at + rng.choice((4, 8)), rng.choice((0, 1, 2**31, 2**32 - 1, 100000, 65535)))
    return bytes(raw)


def bomb(rng, suffix):
    "An image of a gigapixel in some kilobytes."
    side = rng.choice((12_000, 30_000, 60_000))
    if suffix == ".jpg":
        b = bytearray(_image_bytes(np.zeros((24, 31), np.uint16), ".jpg"))
        struct.pack_into(">HH", b, b.index(b"\xff\xc0") + 5, side, side)
        return bytes(b)
    if suffix == ".png":
        return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)) + png_chunk(b"IDAT", zeros(2**28)) + png_chunk(b"IEND", b"")
    tifffile.imwrite(out := io.BytesIO(), np.zeros((8, 8), np.uint8), compression="zlib", photometric="minisblack")
    raw, body = bytearray(out.getvalue()), zeros(2**28)
    tags = tifffile.TiffFile(io.BytesIO(raw)).pages[0].tags
    for name, value in dict(ImageWidth=side, ImageLength=side, RowsPerStrip=side, StripOffsets=len(raw), StripByteCounts=len(body)).items():
        struct.pack_into("<HI" if tags[name].dtype == 4 else "<HHH", raw, tags[name].offset + 2, *((4, 1) if tags[name].dtype == 4 else (4, 1, 0)))
        struct.pack_into("<II", raw, tags[name].offset + 4, 1, value)
    return bytes(raw) + body


def tiff_volume(rng, folder):
    "A TIFF of pages."
    data = np.random.default_rng(rng.randrange(2**32)).integers(0, 65536, SHAPE, dtype=np.uint16)
    how = rng.choice(("plain", "deflate", "LZW"))
    if how == "LZW":
        pages = [Image.fromarray(page) for page in data]
        pages[0].save(out := io.BytesIO(), "tiff", compression="tiff_lzw", save_all=True, append_images=pages[1:])
    else: tifffile.imwrite(out := io.BytesIO(), data, compression="zlib" if how == "deflate" else None, photometric="minisblack")
    raw, kind = out.getvalue(), rng.choice(("sound", "sound", *BYTES, "pages"))
    if kind == "sound": return Made("tiff volume", f"sound, {how}", _write(folder, "volume.tif", raw, data), "read")
    if kind == "pages":  # a directory that is its own next one, or lies nowhere
        b = bytearray(raw)
        at = struct.unpack("<I", raw[4:8])[0]
        struct.pack_into("<I", b, at + 2 + 12 * struct.unpack("<H", raw[at:at + 2])[0], rng.choice((at, 4, 2**32 - 8, len(raw))))
        raw = bytes(b)
    else: raw = BYTES[kind](rng, raw)
    return Made("tiff volume", f"{kind}, {how}", _write(folder, "volume.tif", raw), "refuse" if kind in NEVER else "either")


def image(rng, folder):
    suffix, fmt = rng.choice(((".png", "png"), (".tif", "tiff"), (".jpg", "jpeg")))
    a = np.random.default_rng(rng.randrange(2**32)).integers(0, 65536, (24, 31), dtype=np.uint16)
    kind = rng.choice([*BYTES, "sound", "not_regular", "wrong_name", "bomb"] + ["huge"] * 3 * (fmt == "png") + ["tags"] * 5 * (fmt == "tiff"))
    name = "image" + suffix
    if kind == "not_regular": return Made(fmt, kind, not_regular(rng, folder, name), "refuse")
    if kind == "sound": return Made(fmt, kind, _write(folder, name, _image_bytes(a, suffix), None if fmt == "jpeg" else a), "read")
    if kind == "wrong_name": return Made(fmt, kind, _write(folder, name, nifti_sound(rng, volume(rng))), "refuse")
    if kind == "bomb": return Made(fmt, kind, _write(folder, name, bomb(rng, suffix)))
    if kind in ("huge", "tags"): return Made(fmt, kind, _write(folder, name, (png_huge if kind == "huge" else tiff_tags)(rng, a)))
    raw = BYTES[kind](rng, _image_bytes(a, suffix))
    return Made(fmt, kind, _write(folder, name, raw), "refuse" if kind in NEVER else "either")


# lists and settings

def big_integer(): return "9" * 5000


def table(rng, folder):
    "A list (.csv) of cases."
    path = folder / "list.csv"
    kind = rng.choice(("huge_field", "nul", "binary", "columns", "integers", "surrogate", "many_columns", "absolute", "quotes", "markup",
                       "utf16", "not_regular", "endless_line"))
    if kind == "not_regular": return Made("csv", kind, not_regular(rng, folder, path.name), "refuse")
    rows = dict(huge_field="case,path\na," + "x" * 200_000, nul="case,path\na\0,b\0.nii\n", columns="nothing,of,this\n1,2,3\n",
                integers=f"case,path,patient\n{big_integer()},{big_integer()}.nii,{big_integer()}\n", markup="case,path\n<b>x</b>\x1b[2J,<script>.nii\n",
                surrogate="case,path\na,\udcff\udcfe.nii\n", many_columns="case," + ",".join(f"c{i}" for i in range(20000)) + "\n1\n",
                absolute="case,path\na,/dev/zero\nb,/proc/self/mem\nc,../../../../../etc/passwd\n", quotes='case,path\n"a,b\n' * 300,
                endless_line="case,path\n" + "a," * 10**6).get(kind)
    raw = noise(rng, b"") if kind == "binary" else "case,path\na,b.nii\n".encode("utf-16") if kind == "utf16" else rows.encode("utf-8", "surrogateescape")
    return Made("csv", kind, _write(folder, path.name, raw), "refuse")


def settings(rng, folder):
    "A file of settings (.yaml)."
    kind = rng.choice(("aliases", "deep", "integer", "blocks", "object", "binary", "cut", "keys", "sound", "markup", "not_regular", "merge", "endless"))
    if kind == "not_regular": return Made("yaml", kind, not_regular(rng, folder, "settings.yaml"), "refuse")
    bombs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefghi", "bcdefghij"))
    made = dict(aliases=rng.choice((bombs, bombs.replace("j: &j", "lr: &j"), "lr: &a [*a]\n", bombs.replace("a: &a", "lr: &a", 1))),
        deep="lr: " + "[" * rng.choice((500, 5000)) + "]" * 3000, integer=f"seed: {big_integer()}\nlr: 1e-4\n", object="lr: !!python/object/apply:os.system ['true']\n",
        blocks=rng.choice(("blocks: [100000]\n", "channels: [1000000000]\n", "widths: " + "9" * 400 + "\n")), keys="? [1, 2]\n: 3\n1: 2\nnull: 4\n",
        cut="lr: [1, 2", sound="lr: 1e-4\n", markup="lr: \"\\e[2J<script>\"\n\"\\e[31m\": 1\n", binary="\ud800",
        merge="base: &b {lr: 1}\nlr:\n  <<: *b\n  <<: *b\n", endless="lr: " + "1" * 10**6 + "\n").get(kind)
    raw = rng.randbytes(300) if kind == "binary" else made.encode()
    return Made("yaml", kind, _write(folder, "settings.yaml", raw), dict(sound="read", blocks="either").get(kind, "refuse"))


def msd(rng, folder):
    "A dataset.json as of the Medical Segmentation Decathlon."
    kind = rng.choice(("deep", "integer", "list", "paths", "cut", "types", "labels", "markup", "not_regular"))
    if kind == "not_regular": return Made("json", kind, not_regular(rng, folder, "dataset.json").parent, "refuse")
    entry = [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}]
    made = dict(deep="[" * 100_000, integer='{"numTraining": ' + big_integer() + ', "training": []}', list="[1, 2, 3]",
        paths=json.dumps(dict(training=[{"image": "/dev/zero", "label": "../../../etc/passwd"}], labels={"0": "b", "1": "x"})),
        cut='{"training": [{"image"', types=json.dumps(dict(training=rng.choice((5, "x", {"a": 1}, [1], [None], [[]])), labels={"0": "b"})),
        labels=json.dumps(dict(training=entry, labels=rng.choice(([], 7, {"x": []}, {"1e9": "a"}, {big_integer(): "b"})))),
        markup=json.dumps(dict(training=[{"image": "\x1b[2J<b>.nii", "label": "\0.nii"}], labels={"0": "b", "1": "\x1b[31m"})))[kind]
    _write(folder, "dataset.json", made.encode())
    return Made("json", kind, folder, "refuse")


# paths

def strange_path(rng, folder):
    "A path that no system takes, and a sparse file that is larger than any memory."
    kind = rng.choice(("nul", "surrogate", "long", "sparse", "sparse", "sparse", "up"))
    name = rng.choice(("case.nii", "case.nii.gz", "image.dcm", "image.png", "image.tif", "list.csv", "dataset.json", "settings.yaml"))
    if kind == "nul": return Made("path", kind, folder / f"a\0{name}", "refuse")
    if kind == "surrogate": return Made("path", kind, folder / f"\udcff\udc80{name}", "refuse")
    if kind == "long": return Made("path", kind, folder / ("x" * 5000 + name), "refuse")
    if kind == "up": return Made("path", kind, folder / (f"../{folder.name}/" * 300 + name), "refuse")
    head = {".nii": bytes(nifti_bytes(volume(rng))), ".gz": gzip.compress(bytes(nifti_bytes(volume(rng))), mtime=0), ".dcm": dicom_bytes(dicom(volume(rng), 4, enhanced=True)),
        ".png": _image_bytes(np.zeros((9, 9), np.uint16), ".png"), ".tif": bomb(rng, ".tif")}.get(Path(name).suffix, b"case,path\n")
    path = _write(folder, name, head if rng.random() < 0.7 else b"")
    os.truncate(path, 2**40)
    return Made("path", f"{kind}, {name}", path)


# runs

def run_db(rng, folder):
    "A run directory whose database is damaged or hostile."
    path = folder / "run.db"
    kind = rng.choice(("flip", "cut", "block", "view", "trigger", "endless_view", "other_schema", "blobs", "json", "counts", "empty", "not_regular", "types", "markup", "recipe"))
    if kind == "not_regular": return Made("run", kind, not_regular(rng, folder, "run.db").parent, "refuse")
    if kind == "empty": return Made("run", kind, _write(folder, "run.db", b"").parent, "refuse")
    source = Path(__file__).parents[1] / "fixtures/run_v1/run.db"
    raw = source.read_bytes()
    if kind in BYTES:
        return Made("run", kind, _write(folder, "run.db", BYTES[kind](rng, raw)).parent)
    path.write_bytes(raw)
    db = sqlite3.connect(path, isolation_level=None)
    tables = [r[0] for r in db.execute("SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'")]
    victim = rng.choice(tables)
    columns = [r[1] for r in db.execute(f'PRAGMA table_info("{victim}")')]
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    if kind in ("view", "endless_view"):
        victim = "meta"
        columns = [r[1] for r in db.execute('PRAGMA table_info("meta")')]
        db.execute(f'ALTER TABLE "{victim}" RENAME TO old')
        many = ", ".join(f"x AS {c}" if kind == "endless_view" else f'"{c}"' for c in columns)
        db.execute(f'CREATE VIEW "{victim}" AS ' + (f"{endless} SELECT {many} FROM c" if kind == "endless_view" else f"SELECT {many} FROM old"))
    elif kind == "trigger":
        for t in tables: db.execute(f'CREATE TRIGGER "t_{t}" AFTER INSERT ON "{t}" BEGIN DELETE FROM "{t}"; END')
    elif kind == "other_schema":
        for t in tables: db.execute(f'DROP TABLE "{t}"')
        db.execute("CREATE TABLE meta (a, b, c, d)")
    elif kind == "markup":
        bad = "<script>alert(1)</script>\x1b[2J"
        for key, value in dict(recipe=[bad, bad, {bad: bad}], state=bad, best=dict(metric=bad, value=1.0, step=2)).items():
            db.execute("INSERT OR REPLACE INTO meta(key, value) VALUES(?, ?)", (key, json.dumps(value)))
    elif kind == "recipe":
        value = rng.choice((["os", "system", {}], ["medlab.recipes.base", "Path", {}], ["medlab.recipes.origin", "secrets.token_bytes", {"nbytes": 9}], [], ["x"],
            "text", 5, {"a": 1}, ["subprocess", "Popen", {"args": "true"}], ["medlab.recipes.restoration", "Restoration", [1]], [1, 2, 3]))
        db.execute("INSERT OR REPLACE INTO meta(key, value) VALUES('recipe', ?)", (json.dumps(value),))
    elif kind == "types":
        for t in tables:
            for c in [r[1] for r in db.execute(f'PRAGMA table_info("{t}")')]:
                value = rng.choice((None, "x", b"\xff\xfe", 1e308, 2**62, -1, "<script>"))
                try: db.execute(f'UPDATE "{t}" SET "{c}" = ? WHERE rowid % 3 = 0', (value,))
                except sqlite3.DatabaseError: pass
    else:
        value = dict(blobs=b"\0" * 10**7, json="[" * 50_000, counts=10**12)[kind]
        for c in columns:
            try: db.execute(f'UPDATE "{victim}" SET "{c}" = ? WHERE rowid < 9', (value,))
            except sqlite3.DatabaseError: pass
    db.close()
    return Made("run", kind, folder)


@functools.lru_cache(1)
def zipped(raw, size=3 * GB // 2):
    "A checkpoint of which a tensor inflates to more than a gigabyte."
    with zipfile.ZipFile(io.BytesIO(raw)) as z, zipfile.ZipFile(out := io.BytesIO(), "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for i in z.infolist():
            with new.open(i.filename, "w", force_zip64=True) as f:
                f.write(z.read(i))
                if i.filename.endswith("data/0"):
                    for _ in range(size >> 24): f.write(bytes(2**24))
    return out.getvalue()


def checkpoint(rng, folder):
    "A checkpoint whose hash is right and that is hostile all the same."
    kind = rng.choice(("cut", "flip", "block", "noise", "bomb", "pickle", "legacy_pickle", "sound", "not_regular"))
    if kind == "not_regular": return Made("checkpoint", kind, not_regular(rng, folder, "step_1.pt"), "refuse")
    torch.save(dict(model=dict(w=torch.arange(64.0)), step=3), out := io.BytesIO())
    raw = out.getvalue()
    if kind == "sound": return Made("checkpoint", kind, _write(folder, "step_1.pt", raw), "read")
    if kind in BYTES: return Made("checkpoint", kind, _write(folder, "step_1.pt", BYTES[kind](rng, raw)), "either" if kind in ("flip", "block") else "refuse")
    if kind == "bomb":
        return Made("checkpoint", kind, _write(folder, "step_1.pt", zipped(raw)), "refuse")
    class Evil:
        def __reduce__(self): return os.system, ("touch " + str(folder / "ran"),)
    raw = pickle.dumps(Evil())
    if kind == "pickle":
        with zipfile.ZipFile(out := io.BytesIO(), "w") as z: z.writestr("a/data.pkl", raw), z.writestr("a/version", "3")
        raw = out.getvalue()
    return Made("checkpoint", kind, _write(folder, "step_1.pt", raw), "refuse")


FAMILIES = [nifti] * 4 + [dicom_one] * 4 + [dicom_packed] * 3 + [dicom_series] * 2 + [image] * 3 + [tiff_volume, strange_path, table, settings, msd, run_db, checkpoint]


def make(
    seed:int,  # which file
    folder,  # an empty one
) -> Made:
    "A damaged, a hostile or, now and then, a sound thing."
    rng = random.Random(f"medlab {seed}")
    return rng.choice(FAMILIES)(rng, Path(folder))
