"""All package metadata lives in settings.ini; this hands it to setuptools and puts the tutorials into the wheel."""
import shlex
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

here = Path(__file__).parent.resolve()
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
lib, tutorials = cfg["lib_path"], cfg["nbs_path"] + "/tutorials"
licences = {"apache2": "Apache-2.0"}  # nbdev's name, SPDX's name
status = ["Planning", "Pre-Alpha", "Alpha", "Beta", "Production/Stable", "Mature", "Inactive"]
pythons = [f"3.{n}" for n in range(10, 14)]


def words(key): return shlex.split(cfg.get(key, ""))


def classifiers():
    "The trove classifiers that follow from settings.ini."
    number = int(cfg["status"])
    return [f"Development Status :: {number} - {status[number - 1]}", f"Intended Audience :: {cfg['audience']}",
            f"Natural Language :: {cfg['language']}", *(f"Programming Language :: Python :: {v}" for v in pythons),
            "Framework :: Jupyter", "Topic :: Scientific/Engineering :: Image Processing"]


def extras():
    "The extras; `dev` is everything a developer needs, so it holds `lab`, `track` and `dicom` too."
    found = {k.removesuffix("_requirements"): words(k) for k in cfg if k.endswith("_requirements")}
    return {**found, "dev": found["lab"] + found["track"] + found["dicom"] + found["dev"]}


class BuildWithTutorials(build_py):
    "A wheel carries the tutorial notebooks as `medlab/_tutorials`; an editable install reads them where they are."

    def run(self):
        if self.editable_mode: return super().run()
        shutil.rmtree(Path(self.build_lib, lib), ignore_errors=True)  # an earlier build's modules would stay in it
        super().run()
        if not (source := here / tutorials).is_dir(): return
        ignore = shutil.ignore_patterns(".*", "_*", "runs")
        shutil.copytree(source, Path(self.build_lib, lib, "_tutorials"), ignore=ignore)


class SourceWithSettings(sdist):
    "A source archive holds what this file reads."

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, [*files, "settings.ini", *map(str, Path(tutorials).rglob("[!._]*.*"))])


setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"].split(),
    author=cfg["author"], author_email=cfg["author_email"], url=cfg["git_url"],
    license=licences[cfg["license"]], license_files=["LICENSE"], classifiers=classifiers(),
    long_description=(here / "README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    python_requires=">=" + cfg["min_python"], install_requires=words("requirements"), extras_require=extras(),
    packages=find_packages(include=[lib, lib + ".*"]),
    package_data={lib + ".widgets": ["static/*"], lib + ".deploy": ["templates/*"]},
    zip_safe=False,
    entry_points={"console_scripts": words("console_scripts"), "nbdev": [f"{cfg['lib_name']}={lib}._modidx:d"]},
    cmdclass={"build_py": BuildWithTutorials, "sdist": SourceWithSettings},
)
