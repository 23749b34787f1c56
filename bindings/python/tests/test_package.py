# SPDX-License-Identifier: Apache-2.0
"""The wheel that carries the library, in an environment of its own; types; the README's code."""

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

HERE = pathlib.Path(__file__).resolve().parents[1]


def run(*command, **environment):
    """In an environment without a trace of this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHATTN", "PYTHON", "LD_"))}
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, env={**kept, **environment}, cwd="/")
    if result.returncode != 0:
        raise AssertionError(f"{command}: {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


@unittest.skipUnless(os.environ.get("FLASHATTN_LIBRARY"), "FLASHATTN_LIBRARY is not set")
class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        cls.wheel = cls.root / cls.build(cls.root, FLASHATTN_TORCH_EXTENSION="0", FLASHATTN_JAX_EXTENSION="0")

    @staticmethod
    def build(folder, **environment):
        """The name of a wheel with the library."""
        return run(sys.executable, HERE / "build_backend.py", os.environ["FLASHATTN_LIBRARY"], folder, **environment).strip()

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_name_and_record(self):
        self.assertRegex(self.wheel.name, rf"^flashattn-\d+\.\d+\.\d+-py3-none-manylinux_2_\d+_{os.uname().machine}\.whl$")
        with zipfile.ZipFile(self.wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        record = next(name for name in files if name.endswith("/RECORD"))
        listed = {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(files[record].decode()))}
        self.assertEqual(set(listed), set(files))
        for path, (digest, size) in listed.items():
            if path != record:
                expected = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).rstrip(b"=").decode()
                self.assertEqual((digest, size), ("sha256=" + expected, str(len(files[path]))))
        for wanted in (
            "flashattn/libflashattn.so.0",
            "flashattn/py.typed",
            "flashattn/torch.py",
            "flashattn/transformers.py",
            "flashattn/vllm.py",
            "flashattn/sglang.py",
            "flashattn/jax.py",
            "flashattn/torch_operators.cpp",
            "flashattn/torch_sdpa.h",
            "flashattn/jax_handlers.cpp",
            "flashattn/_build.py",
            "flashattn/include/flashattn/flashattn.h",
        ):
            self.assertIn(wanted, files)
        metadata = files[record.replace("RECORD", "METADATA")].decode()
        self.assertIn("\nVersion: " + self.wheel.name.split("-")[1] + "\n", metadata)

    def test_vllm_and_sglang_find_their_plugins(self):
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(self.root / "plugin")
        found = list(importlib.metadata.distributions(name="flashattn", path=[str(self.root / "plugin")]))[0].entry_points
        plugins = [("vllm.general_plugins", "flashattn.vllm:register"), ("sglang.srt.plugins", "flashattn.sglang:register")]
        self.assertEqual({(e.name, e.group, e.value) for e in found}, {("flashattn", *plugin) for plugin in plugins})
        for group, value in plugins:
            self.assertIn(f'[project.entry-points."{group}"]\nflashattn = "{value}"\n', (HERE / "pyproject.toml").read_text())

    def test_version_is_the_librarys(self):
        import flashattn

        self.assertEqual(self.wheel.name.split("-")[1], flashattn.version())

    def test_equal_input_equal_wheel(self):
        again = self.root / "again"
        name = self.build(again, FLASHATTN_TORCH_EXTENSION="0", FLASHATTN_JAX_EXTENSION="0")
        self.assertEqual((again / name).read_bytes(), self.wheel.read_bytes())

    def test_unpacked_it_runs(self):
        """What any installer does, on any machine: the files of the wheel, in an empty folder."""
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(self.root / "unpacked")
        code = "import flashattn; print(flashattn.__file__, flashattn._abi.lib._name)"
        for path in run(sys.executable, "-c", code, PYTHONPATH=str(self.root / "unpacked")).split():
            self.assertTrue(path.startswith(str(self.root / "unpacked")), path)
        self.assertIn("kernel cpu_", run(sys.executable, HERE / "examples/causal.py", PYTHONPATH=str(self.root / "unpacked")))

    def test_with_the_extensions(self):
        from flashattn import _build

        here = []
        for framework in ("torch", "jax"):
            try:
                _build.build(framework, self.root / framework)
                here.append(framework)
            except _build.Unavailable as missing:
                print(missing)
        if not here:
            self.skipTest("neither PyTorch nor JAX is there")
        first, second = self.root / "first", self.root / "second"
        name = self.build(first)
        self.assertEqual((first / self.build(second)).read_bytes(), (second / name).read_bytes())
        # The extensions ask for no newer system than the library does.
        self.assertEqual(name, self.wheel.name)
        unpacked = self.root / "with_extensions"
        with zipfile.ZipFile(first / name) as archive:
            archive.extractall(unpacked)
        for framework in here:
            own = unpacked / "flashattn" / _build.name_of(framework)
            self.assertNotIn(str(HERE).encode(), own.read_bytes())
            module = {"torch": "_torch_ops", "jax": "jax"}[framework]
            code = f"from flashattn.{module} import extension; print(bool(extension), extension.path or extension.reason)"
            environment = {"PYTHONPATH": str(unpacked)}
            self.assertEqual(run(sys.executable, "-c", code, **environment), f"True {own}\n")
            # Without it the package still works, and can build it.
            own.unlink()
            command = f"flashattn.build_{framework}"
            self.assertIn(f"False it was not built: python3 -m {command}", run(sys.executable, "-c", code, **environment))
            self.assertEqual(run(sys.executable, "-m", command, **environment), f"{own}\n")
            self.assertEqual(run(sys.executable, "-c", code, **environment), f"True {own}\n")

    @unittest.skipUnless(
        importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"),
        "this interpreter makes no environments with pip",
    )
    def test_installed_it_runs(self):
        environment = self.root / "empty"
        run(sys.executable, "-m", "venv", environment)
        python = environment / "bin/python"
        run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", self.wheel)
        self.assertIn("kernel cpu_", run(python, HERE / "examples/causal.py"))
        # The same from the sources: without dependencies and without a network.
        built = self.root / "from_source"
        arguments = ("--no-index", "--no-deps", "--disable-pip-version-check", "--wheel-dir", built)
        run(python, "-m", "pip", "wheel", *arguments, HERE, FLASHATTN_LIBRARY=os.environ["FLASHATTN_LIBRARY"])
        self.assertEqual((built / self.wheel.name).read_bytes(), self.wheel.read_bytes())


class TypesTest(unittest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("mypy"), "mypy is not installed")
    def test_mypy(self):
        command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "--config-file", "pyproject.toml", "flashattn"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
        self.assertEqual(result.returncode, 0, result.stdout)


class ReadmeTest(unittest.TestCase):
    def test_its_code_runs(self):
        blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), flags=re.S)
        self.assertGreaterEqual(len(blocks), 3)
        for block in blocks:
            needed = [
                name for name in ("numpy", "torch", "transformers", "jax") if re.search(rf"^import {name}\b", block, flags=re.M)
            ]
            with self.subTest(block=block.splitlines()[0]):
                missing = [name for name in needed if not importlib.util.find_spec(name)]
                if missing:
                    self.skipTest(f"{missing[0]} is not installed")
                exec(block, {})


if __name__ == "__main__":
    unittest.main()
