"""Patches per second of one way of loading, in a process of its own: python patch_speed.py WAY DATA CACHE WORKERS EACH SIDE.

Prints JSON: for each epoch its name, wall-clock seconds, seconds of processor time of this process and its workers, and
patches. The first epoch begins with an empty cache; the pages of the files are dropped before it and before the last one.
"""
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path

import psutil
import torch

BATCH = 4


def drop(*folders):
    "Drop the pages of all files below folders from the memory of the kernel."
    os.sync()
    for p in (p for folder in folders for p in Path(folder).rglob("*") if p.is_file()):
        fd = os.open(p, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def files(data): return [dict(image=str(p), label=str(p).replace("images", "labels")) for p in sorted(Path(data, "images").glob("*.nii.gz"))]


class Drawn(torch.utils.data.Dataset):
    "Items (case, seed) of a dataset of ours, each case so many times in an epoch."

    def __init__(self, dataset, each): self.dataset, self.each = dataset, each
    def __len__(self): return len(self.dataset) * self.each

    def __getitem__(self, i):
        got = self.dataset[i % len(self.dataset), i]
        return dict(image=got["image"], label=got["label"])


def loader(dataset, workers, batch=BATCH, **kw):
    return torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers, persistent_workers=True, multiprocessing_context="fork", **kw)


def ours(data, cache, workers, each, side, memory=1 << 23):
    from medlab.data.label_files import find_labelled
    from medlab.data.labels import LabelTable
    from medlab.data.patches import PatchDataset
    os.environ["MEDLAB_CACHE"] = str(cache)
    cases = PatchDataset(find_labelled(data).cases, LabelTable((0, 1)), (side,) * 3, cache_bytes=memory)
    made = loader(Drawn(cases, each), workers)
    return lambda: sum(len(b["image"]) for b in made)


def in_memory(*args): return ours(*args, memory=1 << 30)


def without(data, cache, *args): return ours(data, "", *args, memory=0)


def monai(data, cache, workers, each, side, at_once=1):
    from monai.data import PersistentDataset, list_data_collate
    from monai.transforms import (CastToTyped, Compose, EnsureTyped, LoadImaged, NormalizeIntensityd, Orientationd, RandSpatialCropd,
                                  RandSpatialCropSamplesd)
    keys, size = ("image", "label"), dict(roi_size=(side,) * 3, random_size=False)
    crop = RandSpatialCropd(keys, **size) if at_once == 1 else RandSpatialCropSamplesd(keys, num_samples=at_once, **size)
    steps = [LoadImaged(keys, ensure_channel_first=True), Orientationd(keys, "RAS", labels=None), NormalizeIntensityd("image"),
        CastToTyped("label", dtype=torch.uint8), EnsureTyped(keys, track_meta=False)]
    made = loader(PersistentDataset(files(data) * (each // at_once), Compose([*steps, crop]), cache), workers, max(1, BATCH // at_once), collate_fn=list_data_collate)
    return lambda: sum(len(b["image"]) for b in made)


def monai_samples(data, cache, workers, each, side): return monai(data, cache, workers, each, side, each)


def torchio(data, cache, workers, each, side):
    import torchio as tio
    steps = tio.Compose([tio.ToCanonical(), tio.ZNormalization(include=["image"])])
    subjects = tio.SubjectsDataset([tio.Subject(image=tio.ScalarImage(f["image"]), label=tio.LabelMap(f["label"])) for f in files(data)], transform=steps)
    queue = tio.Queue(subjects, max_length=8 * each, samples_per_volume=each, sampler=tio.UniformSampler(side), num_workers=workers)
    made = tio.SubjectsLoader(queue, batch_size=BATCH, num_workers=0)
    return lambda: sum(len(b["image"][tio.DATA]) for b in made)


WAYS = {"ours": ours, "ours, in memory": in_memory, "ours, off": without, "MONAI": monai, "MONAI, all of a volume at once": monai_samples, "TorchIO": torchio}


def spent():
    "Seconds of processor time of this process and its workers, those that have ended included."
    me = psutil.Process()
    return sum(me.cpu_times()[:4]) + sum(sum(c.cpu_times()[:2]) for c in me.children(recursive=True))


def main(way, data, cache, workers, each, side):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    Path(cache).mkdir(parents=True)
    epoch, found = WAYS[way](data, cache, int(workers), int(each), int(side)), []
    for name in ("cold", "warm", "pages dropped"):
        if name != "warm": drop(data, cache)
        start, cpu = time.perf_counter(), spent()
        n = epoch()
        found.append(dict(epoch=name, seconds=time.perf_counter() - start, cpu=spent() - cpu, patches=n))
    print(json.dumps(dict(epochs=found, held=sum(p.stat().st_size for p in Path(cache).rglob("*") if p.is_file()))))
    sys.stdout.flush()
    os._exit(0)  # without waiting for the workers


if __name__ == "__main__": main(*sys.argv[1:])
